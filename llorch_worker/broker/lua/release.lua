-- End a claim: the job is over, goes back to the head of its queue, or is left to the sweep.
--
-- Returns 1 if the claim was the caller's, else 0.

local job_id, fence = ARGV[1], ARGV[2]
-- 'ended'
-- 'queued' to hand the job back; this attempt does not count
-- 'lapsed' to end the lease now, as if the worker had died
local state = ARGV[3]
local keep_s = ARGV[4] -- for the record of an ended job
-- For a job that is handed back: a list of the worker that shall run it, if not its own list. A suspect
-- goes there, too: whoever claims it keeps it apart.
local to = ARGV[5] or ''
local job = job_key(job_id)

local record = redis.call('HMGET', job, 'state', 'fence', 'message', 'list', 'peers', 'progress')
if record[2] ~= fence or record[1] ~= 'claimed' then
  return 0
end
-- The first write, which cannot grow: see allow_writes.
redis.call('ZREM', LEASES, job_id)
if state == 'ended' then
  end_record(job_id, keep_s, keep_s)
  redis.call('EXPIRE', result_key(job_id), keep_s)
  return 1
end
-- A new fence, so that the caller's writes still in flight fail.
redis.call('HINCRBY', job, 'fence', 1)
local suspect = record[5] and record[6] == '0'
local list = to ~= '' and to or suspect and suspects_list(record[4]) or record[4]
if state == 'lapsed' or not takes_jobs(list) then
  redis.call('ZADD', LEASES, 0, job_id)
else
  redis.call('HDEL', job, 'message')
  redis.call('HINCRBY', job, 'attempts', -1)
  redis.call('HSET', job, 'state', 'queued')
  if record[6] == '1' then
    redis.call('HDEL', job, 'strikes', 'peers', 'alone')
  end
  redis.call('RPUSH', list, record[3])
  if to ~= '' then
    ring(bell_of(to))
  end
end
return 1
