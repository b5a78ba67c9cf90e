-- Put a job into its queue, once, if the queue has room, and wake a worker: the one that the job is
-- placed with, if it may be. On refusal, nothing is written.
--
-- The first write may grow: a server at maxmemory refuses it, and nothing is left behind.
--
-- KEYS: the list to push to, then, if there is a limit, every list in which jobs of this model wait.
--
-- Returns {'sent', id}, {'known', id of the first job with this idempotency key}, {'other', its id} if it was
-- sent with another request, or {'full', jobs that wait}.
--
-- Parts: lists, bells, tenants, placing, first_job

-- How many messages wait. Nearly all lists are empty: one command rules out many.
local function count_waiting()
  local filled = redis.call('EXISTS', unpack(KEYS, 2))
  local waiting = filled > 0 and redis.call('LLEN', KEYS[1]) or 0
  if waiting > 0 then
    waiting = waiting + waiting_behind(KEYS[1])
    filled = filled - 1
  end
  for i = 2, filled > 0 and #KEYS or 0 do
    waiting = waiting + (KEYS[i] ~= KEYS[1] and length(KEYS[i]) or 0)
  end
  return waiting
end

local job_id = ARGV[1]
local before, after = ARGV[2], ARGV[3] -- the message before and after its enqueue time
local limit = tonumber(ARGV[4]) -- the most waiting jobs; 0 for no limit
local keep_s = ARGV[5] -- for the record and the idempotency key of a job that is never claimed
local idempotency = ARGV[6] -- the key, or ''
local request = ARGV[7] -- with a key, a digest of the request
local tenant = ARGV[8] -- or '': see tenants.lua
local deadline_ms = ARGV[9] -- from now, or ''
local owner = ARGV[10] -- the gateway's key that sends the job, or ''
local awaited_s = ARGV[11] -- for how long a reader counts as there already; 0 for none
local candidates = {unpack(ARGV, 12)} -- places, the best first; none for a job that is not placed

if idempotency ~= '' then
  local first, differs = first_job(idempotency, request)
  if first then
    return {differs and first ~= job_id and 'other' or 'known', first}
  end
end

local job = job_key(job_id)
local gone = gone_key(queue_of(KEYS[1])) -- jobs that have ended, whose messages wait
local messages = limit > 0 and count_waiting()
if limit > 0 and messages >= limit then
  local waiting = messages - redis.call('SCARD', gone)
  if waiting >= limit then
    return redis.call('HEXISTS', job, 'sent') == 1 and {'sent', job_id} or {'full', waiting}
  end
end
-- Not now_us: the time is needed as text alone, and each function costs time.
local seconds, microseconds = unpack(redis.call('TIME'))
local now_s = seconds .. '.' .. ('0'):rep(6 - #microseconds) .. microseconds
if redis.call('HSETNX', job, 'sent', now_s) == 0 then
  -- The reply to the first push was lost, and the client sent it again.
  return {'sent', job_id}
end
redis.call('EXPIRE', job, keep_s)
redis.call('HSET', job, 'line', KEYS[1], 'tenant', tenant, 'owner', owner)
if awaited_s ~= '0' then
  redis.call('HSET', job, 'awaited_s', seconds + awaited_s)
end
if deadline_ms ~= '' then
  redis.call('ZADD', DEADLINES, math.floor(now_s * 1000) + deadline_ms, job_id)
end
if idempotency ~= '' then
  redis.call('SET', idempotency, job_id, 'EX', keep_s)
  redis.call('HSET', job, 'idempotency', idempotency, 'request', request)
end
local place = candidates[1] and choose_place(candidates)
-- Once all workers are full, the one that the job suits best prefers it to others that wait.
local preferred = place or candidates[1]
local header = preferred and place_header(preferred) or ''
local message = before .. now_s .. header .. after
if tenant == '' then
  redis.call('LPUSH', KEYS[1], message)
else
  push_for_tenant(KEYS[1], tenant, message)
end
if messages == 0 then
  redis.call('DEL', gone) -- celery purge takes messages, and nothing else
end
if place and ring(bell_key(place)) then
  redis.call('ZINCRBY', load_of(place), 1, place)
else
  -- The worker has not answered the last ring: it is busy claiming, or dead.
  if place then
    redis.call('ZREM', load_of(place), place)
  end
  ring(bell_of(KEYS[1]))
end
return {'sent', job_id}
