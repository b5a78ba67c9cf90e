-- Journal new events of a job, each once, if the claim they were made under still holds.
--
-- KEYS[1]   llorch:job:<id>         hash    state, fence, progress
-- KEYS[2]   llorch:job:<id>:events  stream  entries 1-0, 2-0, ..., each with one field, event
-- KEYS[3]   llorch:job:<id>:cancel  string  present once a cancel was asked for
-- ARGV[1]   fence of the claim
-- ARGV[2]   number of the first entry here; entries that are there already are passed over, so a
--           write whose answer was lost can be sent again
-- ARGV[3]   seconds that the stream is kept after its last entry
-- ARGV[4]   1 if there are tokens among the events, else 0
-- ARGV[5..] events, each one JSON document
--
-- Returns 1 if they are in the stream, 2 if besides a cancel was asked for, 0 if the claim was lost.

local record = redis.call('HMGET', KEYS[1], 'state', 'fence')
if record[1] ~= 'claimed' or record[2] ~= ARGV[1] then
  return 0
end
-- A write that cannot grow first: a server at maxmemory then lets the rest through. Jobs in hand are
-- few, and their ends make room.
redis.call('PERSIST', KEYS[2])
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local last_number = last and tonumber(last[1]:match('^%d+')) or 0
for i = 5, #ARGV do
  local number = tonumber(ARGV[2]) + i - 5
  if number > last_number then
    redis.call('XADD', KEYS[2], string.format('%d-0', number), 'event', ARGV[i])
  end
end
if ARGV[4] == '1' then
  redis.call('HSET', KEYS[1], 'progress', 1)
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1 + redis.call('EXISTS', KEYS[3])
