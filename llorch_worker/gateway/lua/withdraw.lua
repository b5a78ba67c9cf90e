-- Take back what admit.lua has given to a job that was not enqueued then. Its request stays counted.
--
-- KEYS: the sorted set of the key's jobs in flight.
--
-- Parts: usage

local job_id = ARGV[1]
local state, sent, reserved = unpack(redis.call('HMGET', job_key(job_id), 'state', 'sent', 'reserved'))
redis.call('ZREM', KEYS[1], job_id)
if not (state or sent) then
  settle(job_id, reserved, 0)
end
return 1
