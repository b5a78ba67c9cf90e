-- Store a job's state in the key and format of Celery's Redis backend; a terminal one ends it, and
-- the claim with it.
--
-- The result and the stream's last events appear together, once: whoever comes second, or comes
-- with a claim that was lost, stores nothing.
--
-- KEYS[1]  celery-task-meta-<id>   string
-- KEYS[2]  llorch:job:<id>         hash    state, fence
-- KEYS[3]  llorch:job:<id>:events  stream
-- KEYS[4]  llorch:leases           zset    job id -> when its lease ends, ms of Redis' own clock
-- ARGV[1]  fence of the claim; '' for a job that nobody claimed
-- ARGV[2]  the document
-- ARGV[3]  seconds that it is kept
-- ARGV[4]  the last event, one JSON document, or '' where the state is not terminal
-- ARGV[5]  seconds that the stream is kept
-- ARGV[6]  job id
-- ARGV[7]  number of the first of the entries that are still to be written before the last event;
--          those that are there already are passed over
-- ARGV[8..] those entries, each one JSON document
--
-- Returns 1 if it was stored, else 0.

local record = redis.call('HMGET', KEYS[2], 'state', 'fence')
local state, fence = record[1], record[2]
if ARGV[1] == '' then
  if state == 'claimed' or state == 'ended' then
    return 0
  end
elseif state ~= 'claimed' or fence ~= ARGV[1] then
  return 0
end
-- A write that cannot grow first: a server at maxmemory then lets the rest through.
redis.call('PERSIST', KEYS[2])
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
-- Celery's own backend publishes on the key's name: that wakes AsyncResult.get().
redis.call('PUBLISH', KEYS[1], ARGV[2])
if ARGV[4] ~= '' then
  -- Protected calls: a stream key that somebody else wrote to must not cost the result.
  local entries = redis.pcall('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
  if not entries.err then
    local number = entries[1] and tonumber(entries[1][1]:match('^%d+')) or 0
    for i = 8, #ARGV do
      local own = tonumber(ARGV[7]) + i - 8
      if own > number then
        number = own
        redis.pcall('XADD', KEYS[3], string.format('%d-0', number), 'event', ARGV[i])
      end
    end
    redis.pcall('XADD', KEYS[3], string.format('%d-0', number + 1), 'event', ARGV[4])
    redis.call('EXPIRE', KEYS[3], ARGV[5])
  end
  -- As release.lua would, so that the worker need not come back for it; but a refused message is
  -- buried after its result, and that needs the list.
  redis.call('ZREM', KEYS[4], ARGV[6])
  redis.call('HDEL', KEYS[2], 'message')
  redis.call('HSET', KEYS[2], 'state', 'ended')
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
return 1
