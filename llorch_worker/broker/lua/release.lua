-- End a claim: the job is over, or it goes back to the head of its queue.
--
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; a claim that was lost releases nothing
-- ARGV[3]  'ended', or 'queued' to hand the job back; a drain's attempt does not count
-- ARGV[4]  seconds that the record of an ended job is kept
--
-- Returns 1 if the claim was the caller's, else 0.

local job_id, fence, state, keep_s = unpack(ARGV)
local job = job_key(job_id)

local record = redis.call('HMGET', job, 'state', 'fence', 'message', 'list')
if record[2] ~= fence then
  return 0
end
if state == 'ended' then
  -- A stored result has ended the job already; what is left of the claim goes.
  redis.call('ZREM', LEASES, job_id)
  redis.call('HDEL', job, 'message', 'list')
  redis.call('HSET', job, 'state', 'ended')
  redis.call('EXPIRE', job, keep_s)
  return 1
end
if record[1] ~= 'claimed' then
  return 0
end
redis.call('ZREM', LEASES, job_id)
redis.call('HDEL', job, 'message')
-- The next writer has another fence, whatever of ours is still under way.
redis.call('HINCRBY', job, 'fence', 1)
redis.call('HINCRBY', job, 'attempts', -1)
redis.call('HSET', job, 'state', 'queued')
redis.call('RPUSH', record[4], record[3])
return 1
