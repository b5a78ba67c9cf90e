-- Put a job into its queue, once, if the queue has room: all of it or nothing.
--
-- KEYS[1]   the list to push to
-- KEYS[2..] every list that jobs of this model wait in
-- ARGV[1]   job id
-- ARGV[2]   the message up to the time at which it was enqueued
-- ARGV[3]   the message from there on
-- ARGV[4]   the most jobs that may wait, or 0 for any number
-- ARGV[5]   seconds that the job's `sent` key and the idempotency key are kept
-- ARGV[6]   the idempotency key, or ''
--
-- The first write may grow: a server at maxmemory refuses it, and nothing is left behind.
--
-- Returns {'sent', id}, {'known', id of the first job with this idempotency key}, or
-- {'full', jobs that wait}.

local job_id, before, after, limit, keep_s, idempotency = unpack(ARGV)
limit = tonumber(limit)

if redis.call('EXISTS', sent_key(job_id)) == 1 then
  -- Sent again because the answer to the first push was lost.
  return {'sent', job_id}
end
local first = idempotency ~= '' and redis.call('GET', idempotency)
if first then
  return {'known', first}
end
if limit > 0 then
  local waiting = 0
  for i = 2, #KEYS do
    waiting = waiting + redis.call('LLEN', KEYS[i])
  end
  if waiting >= limit then
    return {'full', waiting}
  end
end
local clock = redis.call('TIME')
local now_s = string.format('%d.%06d', clock[1], clock[2])
redis.call('SET', sent_key(job_id), now_s, 'EX', keep_s)
if idempotency ~= '' then
  redis.call('SET', idempotency, job_id, 'EX', keep_s)
end
redis.call('LPUSH', KEYS[1], before .. now_s .. after)
return {'sent', job_id}
