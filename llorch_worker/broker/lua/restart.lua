-- Void the events of a job that begins again, if the caller's claim still holds, and say so in the stream.
--
-- Returns 1 if the stream begins with the event, else 0.
--
-- Writes at maxmemory.

local job_id, fence = ARGV[1], ARGV[2]
local number = ARGV[3] -- of the entry
local event = ARGV[4] -- JSON

if not is_claimed(job_id, fence) then
  return 0
end
redis.call('XTRIM', events_key(job_id), 'MINID', number .. '-0')
write_events(redis.call, job_id, number, {event})
return 1
