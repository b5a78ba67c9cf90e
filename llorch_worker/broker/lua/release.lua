-- End a claim: the job is over, goes back to the head of its queue, waits for its ETA, or is blamed for a death.
--
-- A job is blamed if its engine died while it computed the job. That is a strike, and makes it a suspect until
-- it makes progress. A suspect runs beside no other, and its sequences in steps of their own. So it may share
-- its first strike with innocent jobs, which then make progress, but no later one.
--
-- Returns 1, or 0 if the claim was not the caller's, or the job waits in its list for want of a place for ETAs.
--
-- Parts: lists, bells
-- Writes at maxmemory.

local job_id, fence = ARGV[1], ARGV[2]
-- 'ended'
-- 'queued' to hand the job back; this attempt does not count
-- 'scheduled' to do so at the job's ETA
-- 'blamed' to hand it back as a suspect; this attempt counts
-- 'lapsed' to do so with the next sweep
local state = ARGV[3]
local keep_s = ARGV[4] -- for the record of an ended job
-- For a job that is handed back: a list of the worker that shall run it, if not its own list. A suspect
-- goes there, too: whoever claims it keeps it apart.
local to = ARGV[5] or ''
local eta_ms = ARGV[6]
local most_strikes = tonumber(ARGV[7]) -- that a job which is blamed may now have
local job = job_key(job_id)

local record = redis.call('HMGET', job, 'state', 'fence', 'message', 'list', 'strikes', 'progress')
if record[2] ~= fence or record[1] ~= 'claimed' then
  return 0
end
redis.call('ZREM', LEASES, job_id)
if state == 'ended' then
  end_record(job_id, keep_s, keep_s)
  redis.call('EXPIRE', result_key(job_id), keep_s)
  return 1
end
-- A new fence, so that the caller's writes still in flight fail.
redis.call('HINCRBY', job, 'fence', 1)
local blamed = state == 'blamed' or state == 'lapsed'
local strikes = record[6] == '0' and record[5]
if blamed then
  strikes = math.min((strikes or 0) + 1, most_strikes)
  redis.call('HSET', job, 'strikes', strikes, 'progress', 0)
elseif not strikes then
  redis.call('HDEL', job, 'strikes')
end
local list = to ~= '' and to or strikes and suspects_list(record[4]) or record[4]
if state == 'lapsed' or not takes_jobs(list) then
  redis.call('ZADD', LEASES, 0, job_id)
  return 1
end
local attempts = redis.call('HINCRBY', job, blamed and 'deaths' or 'attempts', blamed and 1 or -1)
if state == 'scheduled' and attempts == 0 then
  redis.call('HDEL', job, 'first_claim_ms', 'history')
  redis.call('DEL', result_key(job_id))
end
-- Somebody's key of another type may be in the way.
if state == 'scheduled' and type(redis.pcall('ZADD', scheduled_set(list), eta_ms, job_id)) == 'number' then
  redis.call('HSET', job, 'state', 'scheduled', 'eta_ms', eta_ms)
  return 1
end
redis.call('HSET', job, 'state', 'queued')
redis.call('HDEL', job, 'message')
redis.call(state == 'queued' and 'RPUSH' or 'LPUSH', list, record[3])
ring(bell_of(list))
return state == 'scheduled' and 0 or 1
