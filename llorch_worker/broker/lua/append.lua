-- Journal new events of a job, each once, if the caller's claim still holds.
--
-- Returns 1 if they are in the stream, 2 if a cancel was also requested, 0 if the claim was lost, or
-- earlier entries.

local job_id = ARGV[1]
local fence = ARGV[2]
local first = ARGV[3] -- number of the first entry
local has_tokens = ARGV[4] == '1'
local events = {unpack(ARGV, 5)} -- JSON documents

local state, holder, progress = unpack(redis.call('HMGET', job_key(job_id), 'state', 'fence', 'progress'))
if state ~= 'claimed' or holder ~= fence or has_gap(job_id, fence, first) then
  return 0
end
allow_writes()
write_events(redis.call, job_id, first, events)
if has_tokens and progress ~= '1' then
  redis.call('HSET', job_key(job_id), 'progress', 1)
end
return 1 + redis.call('EXISTS', cancel_key(job_id))
