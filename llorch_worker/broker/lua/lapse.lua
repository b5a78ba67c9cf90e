-- End a lease before its time: the worker lives, but what it computed with does not.
--
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; a claim that was lost ends nothing
--
-- Returns 1 if the claim was the caller's, else 0.

local job_id, fence = unpack(ARGV)

if not is_claimed(job_id, fence) then
  return 0
end
allow_writes()
-- Nothing of ours can settle the job any more.
redis.call('HINCRBY', job_key(job_id), 'fence', 1)
redis.call('ZADD', LEASES, 0, job_id)
return 1
