-- Put a dead letter's job back into its queue, to go on from its journal with all its attempts.
--
-- KEYS[1]  llorch:dead             list    dead letters
-- KEYS[2]  llorch:job:<id>         hash    state, attempts, fence, history, list, progress
-- KEYS[3]  llorch:job:<id>:events  stream
-- KEYS[4]  celery-task-meta-<id>   string
-- ARGV[1]  the dead letter, byte by byte
-- ARGV[2]  seconds that an event stream is kept
-- Touches  the list named in the letter
--
-- Returns 'retried'; 'gone' (no such letter any more); 'under way' (the same job waits or runs);
-- 'ended' (it has another end than a failure). Only the first changes anything.

local letter = cjson.decode(ARGV[1])
local state = redis.call('HGET', KEYS[2], 'state')
if state == 'claimed' or state == 'queued' then
  return 'under way'
end
local document = redis.call('GET', KEYS[4])
if document then
  local ok, meta = pcall(cjson.decode, document)
  if ok and type(meta) == 'table' and meta.status ~= 'FAILURE' then
    return 'ended'
  end
end
-- Also a write that cannot grow: a server at maxmemory then lets the rest through.
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
  return 'gone'
end
redis.call('DEL', KEYS[4])

-- The stream without its last event, made anew: XADD refuses the id of a deleted last entry, and
-- the next attempt writes its first event under that very id.
local entries = redis.pcall('XRANGE', KEYS[3], '-', '+')
if not entries.err and #entries > 0 then
  local ok, last = pcall(cjson.decode, entries[#entries][2][2])
  if ok and type(last) == 'table' and last.type == 'failed' then
    redis.call('DEL', KEYS[3])
    for i = 1, #entries - 1 do
      redis.call('XADD', KEYS[3], entries[i][1], unpack(entries[i][2]))
    end
    redis.call('EXPIRE', KEYS[3], ARGV[2])
  end
end

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSET', KEYS[2], 'state', 'queued', 'list', letter.list, 'attempts', 0, 'progress', 0,
  'history', letter.history .. string.format('(retried) %.0f\n', now_ms))
redis.call('HDEL', KEYS[2], 'spared')
-- The record may have expired. That it exists makes the next claim read the journal.
redis.call('HINCRBY', KEYS[2], 'fence', 1)
redis.call('PERSIST', KEYS[2])
-- The queue's tail: those who waited come first.
redis.call('LPUSH', letter.list, letter.message)
return 'retried'
