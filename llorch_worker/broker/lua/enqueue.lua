-- Put a job into its queue, once, if the queue has room, and wake a worker. On refusal, nothing is written.
--
-- The first write may grow: a server at maxmemory refuses it, and nothing is left behind.
--
-- KEYS: the list to push to, then every list in which jobs of this model wait.
--
-- Returns {'sent', id}, {'known', id of the first job with this idempotency key}, or
-- {'full', jobs that wait}.

local job_id = ARGV[1]
local before, after = ARGV[2], ARGV[3] -- the message before and after its enqueue time
local limit = tonumber(ARGV[4]) -- the most waiting jobs; 0 for no limit
local keep_s = ARGV[5] -- for the record and the idempotency key of a job that is never claimed
local idempotency = ARGV[6] -- the key, or ''

local first = idempotency ~= '' and redis.call('GET', idempotency)
if first then
  return {'known', first}
end

-- How many jobs wait. Nearly all lists are empty: one command rules out many.
local function count_waiting()
  local filled = redis.call('EXISTS', unpack(KEYS, 2))
  local waiting = filled > 0 and redis.call('LLEN', KEYS[1]) or 0
  if waiting > 0 then
    filled = filled - 1
  end
  for i = 2, filled > 0 and #KEYS or 0 do
    waiting = waiting + (KEYS[i] ~= KEYS[1] and redis.call('LLEN', KEYS[i]) or 0)
  end
  return waiting
end

local job = job_key(job_id)
if limit > 0 then
  local waiting = count_waiting()
  if waiting >= limit then
    return redis.call('HEXISTS', job, 'sent') == 1 and {'sent', job_id} or {'full', waiting}
  end
end
local clock = redis.call('TIME')
local now_s = string.format('%d.%06d', clock[1], clock[2])
if redis.call('HSETNX', job, 'sent', now_s) == 0 then
  -- The reply to the first push was lost, and the client sent it again.
  return {'sent', job_id}
end
redis.call('EXPIRE', job, keep_s)
if idempotency ~= '' then
  redis.call('SET', idempotency, job_id, 'EX', keep_s)
  redis.call('HSET', job, 'idempotency', idempotency)
end
redis.call('LPUSH', KEYS[1], before .. now_s .. after)
ring(bell_of(KEYS[1]))
return {'sent', job_id}
