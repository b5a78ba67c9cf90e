-- Renew the leases of the jobs that a worker is at work on.
--
-- KEYS[1]   llorch:leases  zset  job id -> when its lease ends, ms of Redis' own clock
-- ARGV[1]   lease, ms
-- ARGV[2..] pairs: job id, fence
-- Reads     llorch:job:<id>
--
-- Returns the ids whose claim is not the caller's any more: it must stop work on them.

local clock = redis.call('TIME')
local until_ms = clock[1] * 1000 + math.floor(clock[2] / 1000) + tonumber(ARGV[1])
-- A write that cannot grow first: a server at maxmemory then lets the rest through. Without it every
-- running job would lose its lease there.
redis.call('PERSIST', KEYS[1])
local lost = {}
for i = 2, #ARGV, 2 do
  local record = redis.call('HMGET', 'llorch:job:' .. ARGV[i], 'state', 'fence')
  if record[1] == 'claimed' and record[2] == ARGV[i + 1] then
    redis.call('ZADD', KEYS[1], until_ms, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
