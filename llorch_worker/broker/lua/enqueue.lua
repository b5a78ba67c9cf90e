-- Put a job into its queue, once, if the queue has room: all of it or nothing.
--
-- KEYS[1]   llorch:job:<id>:sent  string  present once the job was pushed, so that a push whose
--                                         answer was lost can be sent again
-- KEYS[2]   the list to push to
-- KEYS[3..] every list that jobs of this model wait in
-- ARGV[1]   job id
-- ARGV[2]   the message up to the time at which it was enqueued
-- ARGV[3]   the message from there on
-- ARGV[4]   the most jobs that may wait, or 0 for any number
-- ARGV[5]   seconds that KEYS[1] and the idempotency key are kept
-- ARGV[6]   llorch:idempotency:<model>:<key>, or ''
--
-- The first write is one that grows: a server at maxmemory refuses it, and nothing is left behind.
--
-- Returns {'sent', id}, {'known', id of the first job with this idempotency key}, or
-- {'full', jobs that wait}.

local id, limit, keep_s, idempotency = ARGV[1], tonumber(ARGV[4]), ARGV[5], ARGV[6]

if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'sent', id}
end
local first = idempotency ~= '' and redis.call('GET', idempotency)
if first then
  return {'known', first}
end
if limit > 0 then
  local waiting = 0
  for i = 3, #KEYS do
    waiting = waiting + redis.call('LLEN', KEYS[i])
  end
  if waiting >= limit then
    return {'full', waiting}
  end
end
-- Leases and deadlines are measured by this clock too.
local clock = redis.call('TIME')
local now_s = string.format('%d.%06d', clock[1], clock[2])
redis.call('SET', KEYS[1], now_s, 'EX', keep_s)
if idempotency ~= '' then
  redis.call('SET', idempotency, id, 'EX', keep_s)
end
redis.call('LPUSH', KEYS[2], ARGV[2] .. now_s .. ARGV[3])
return {'sent', id}
