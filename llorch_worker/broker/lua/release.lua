-- End a claim: the job is over, waits again, waits for its ETA, or is blamed for a death.
--
-- A job is blamed if its engine died while it computed the job. That is a strike, and makes it a suspect until
-- it makes progress. A suspect runs beside no other, and its sequences in steps of their own. So it may share
-- its first strike with innocent jobs, which then make progress, but no later one.
--
-- Returns 1, or 0 if the claim was not the caller's.
--
-- Parts: names, wake_ups, score, waiting
-- Writes at maxmemory.

local job_id, fence = ARGV[1], ARGV[2]
-- 'ended'
-- 'waiting' to hand the job back; this attempt does not count
-- 'scheduled' to do so at the job's ETA
-- 'blamed' to hand it back as a suspect; this attempt counts
-- 'lapsed' to do so with the next sweep
local to = ARGV[3]
local keep_s = ARGV[4] -- for the record of an ended job
local eta_ms = ARGV[5]
local most_strikes = tonumber(ARGV[6]) -- that a job which is blamed may now have
-- Of a job that is handed back because the caller lacks something: what it needs, or '', and a worker that has it.
local needs_fingerprint, least_context, place = ARGV[7] or '', ARGV[8] or '', ARGV[9] or ''
local job = job_key(job_id)

local state, holder, list, strikes, progress, reads, tenant, cost = unpack(redis.call('HMGET', job, 'state', 'fence',
  'list', 'strikes', 'progress', 'reads', 'tenant', 'cost'))
if holder ~= fence or state ~= 'claimed' then
  return 0
end
redis.call('ZREM', LEASES, job_id)
if to == 'ended' then
  end_record(job_id, keep_s, keep_s)
  redis.call('EXPIRE', result_key(job_id), keep_s)
  return 1
end
-- A new fence, so that the caller's writes still in flight fail.
redis.call('HINCRBY', job, 'fence', 1)
local blamed = to == 'blamed' or to == 'lapsed'
strikes = progress == '0' and strikes
if blamed then
  redis.call('HSET', job, 'strikes', math.min((strikes or 0) + 1, most_strikes), 'progress', 0)
elseif not strikes then
  redis.call('HDEL', job, 'strikes')
end
if to == 'lapsed' then
  redis.call('ZADD', LEASES, 0, job_id)
  return 1
end
local attempts = redis.call('HINCRBY', job, blamed and 'deaths' or 'attempts', blamed and 1 or -1)
-- Whoever cancelled it meanwhile was told that its worker hears of it: the next claim is to end it at once.
if to == 'scheduled' and redis.call('EXISTS', cancel_key(job_id)) == 0 then
  if attempts == 0 then
    redis.call('HDEL', job, 'first_claim_ms', 'history')
    redis.call('DEL', result_key(job_id))
  end
  -- It has used nothing. Once it is due, its tenant is charged as if it came then.
  refund(model_of(list), class_of(list), tenant or '', cost or 0, reads == '1')
  redis.call('HSET', job, 'state', 'scheduled', 'eta_ms', eta_ms)
  redis.call('ZADD', scheduled_key(model_of(list)), eta_ms, job_id)
  return 1
end
if needs_fingerprint ~= '' or least_context ~= '' then
  redis.call('HSET', job, 'needs_fingerprint', needs_fingerprint, 'least_context', least_context, 'prefers', place)
end
let_wait(job_id, list)
if place ~= '' then
  wake_place(place)
else
  wake(list, reads == '1')
end
return 1
