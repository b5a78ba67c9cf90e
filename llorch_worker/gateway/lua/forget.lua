-- Delete the text of a job that has ended, and whatever would lead to it. Of a job that has not, only the
-- owner changes.
--
-- Returns 1 if no text is left, 0 if the job has not ended.
--
-- Parts: letters
-- Writes at maxmemory.

local job_id = ARGV[1]
local nobody = ARGV[2] -- its owner from now on
local job = job_key(job_id)

local known = redis.call('EXISTS', job) == 1
if known then
  redis.call('HSET', job, 'owner', nobody)
end
local state, idempotency, buried = unpack(redis.call('HMGET', job, 'state', 'idempotency', 'buried'))
if known and state ~= 'ended' then
  return 0
end
redis.call('DEL', result_key(job_id), events_key(job_id))
if idempotency and redis.call('GET', idempotency) == job_id then
  redis.call('DEL', idempotency)
end
if buried then
  drop_letter(buried)
end
return 1
