-- Let a job wait, once, if its queue has room, and wake a worker: the one that the job is placed with, if it may be.
-- On refusal, nothing is written.
--
-- The first write may grow: a server at maxmemory refuses it, and nothing is left behind.
--
-- KEYS: if there is a limit, the model's inbox lists.
--
-- Returns {'sent', id}, {'known', id of the first job with this idempotency key}, {'other', its id} if it was
-- sent with another request, {'full', jobs that wait}, or {'lost', id} if its message is not staged any more.
--
-- Parts: names, wake_ups, affinity, score, waiting, first_job

local job_id = ARGV[1]
-- The message before and after its enqueue time; or, for one that is staged, the call that did so, and where its
-- enqueue time goes.
local before, after = ARGV[2], ARGV[3]
local staged = tonumber(after) and staged_key(before)
local list = ARGV[4] -- that a stock producer would push to
local limit = tonumber(ARGV[5]) -- the most waiting jobs; 0 for no limit
local keep_s = ARGV[6] -- for the idempotency key of a job that is never claimed
local idempotency = ARGV[7] -- the key, or ''
local request = ARGV[8] -- with a key, a digest of the request
local tenant = ARGV[9] -- or ''
local tokens = tonumber(ARGV[10]) -- that it is expected to take: see parts/score.lua
local deadline_ms = ARGV[11] -- from now, or ''
local owner = ARGV[12] -- the gateway's key that sends the job, or ''
local awaited_s = ARGV[13] -- for how long a reader counts as there already; 0 for none
local least_context = ARGV[14] -- that its worker must have, or '' if nobody knows
local reads = ARGV[15] -- 1 if it reads texts, or ''
local candidates = {unpack(ARGV, 16)} -- places, the best first; none for a job that is not placed
local job, model = job_key(job_id), model_of(list)

if idempotency ~= '' then
  local first, differs = first_job(idempotency, request)
  if first then
    return {differs and first ~= job_id and 'other' or 'known', first}
  end
end
if limit > 0 then
  local waiting = redis.call('ZCARD', waiting_key(model))
  -- The inbox is nearly always empty, which one command finds.
  for _, inbox in ipairs(redis.call('EXISTS', unpack(KEYS)) > 0 and KEYS or {}) do
    local jobs = redis.pcall('LLEN', inbox) -- an error: somebody's key of another type
    waiting = waiting + (type(jobs) == 'number' and jobs or 0)
  end
  if waiting >= limit then
    return redis.call('HEXISTS', job, 'sent') == 1 and {'sent', job_id} or {'full', waiting}
  end
end
if staged and redis.call('EXISTS', staged) == 0 then
  return {redis.call('HEXISTS', job, 'sent') == 1 and 'sent' or 'lost', job_id}
end
-- Not now_us: the time is needed as text alone, and each function costs time.
local seconds, microseconds = unpack(redis.call('TIME'))
local now_s = seconds .. '.' .. ('0'):rep(6 - #microseconds) .. microseconds
if redis.call('HSETNX', job, 'sent', now_s) == 0 then
  -- The reply to the first call was lost, and the client sent it again.
  return {'sent', job_id}
end
local place = candidates[1] and choose_place(candidates)
local fields = {}
local function note(name, value)
  if value and value ~= '' then
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
end
local score, cost = score_at_tail(list, tenant, tokens, reads ~= '')
note('cost', cost)
note('tenant', tenant)
note('owner', owner)
note('least_context', least_context)
note('reads', reads)
-- Once all workers are full, the one that the job suits best prefers it to others that wait.
note('prefers', place or candidates[1])
note('awaited_s', awaited_s ~= '0' and seconds + awaited_s)
if idempotency ~= '' then
  note('idempotency', idempotency)
  note('request', request)
  redis.call('SET', idempotency, job_id, 'EX', keep_s)
end
redis.call('HSET', job, 'state', 'waiting', 'list', list, unpack(fields))
redis.call('PERSIST', job) -- it may have been reserved for a while
if staged then
  -- No command copies it.
  redis.call('SETRANGE', staged, after, now_s)
  redis.call('PERSIST', staged)
  redis.call('RENAME', staged, message_key(job_id))
else
  redis.call('SET', message_key(job_id), before .. now_s .. after)
end
if deadline_ms ~= '' then
  redis.call('ZADD', DEADLINES, math.floor(now_s * 1000) + deadline_ms, job_id)
end
redis.call('ZADD', waiting_key(model), score, job_id)
if place and wake_place(place) then
  redis.call('ZINCRBY', load_of(place), 1, place)
else
  -- The worker has not answered the last wake-up: it is busy claiming, or dead.
  if place then
    redis.call('ZREM', load_of(place), place)
  end
  wake(list, reads ~= '')
end
return {'sent', job_id}
