-- Reserve an idempotency key for a claimed job. The key expires after the job's end.
--
-- KEYS: the idempotency key.
--
-- Returns the id of the job that has the key.
--
-- Parts: first_job
-- Writes at maxmemory.

local job_id, keep_s = ARGV[1], ARGV[2]

local owner = first_job(KEYS[1])
if owner and owner ~= job_id then
  return owner
end
if not owner then
  redis.call('SET', KEYS[1], job_id, 'EX', keep_s)
end
local state = redis.call('HGET', job_key(job_id), 'state')
if state and state ~= 'ended' then
  -- Also if the claim was lost meanwhile and the job waits again.
  redis.call('PERSIST', KEYS[1])
  redis.call('HSET', job_key(job_id), 'idempotency', KEYS[1])
end
return job_id
