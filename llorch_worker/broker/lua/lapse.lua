-- End a lease before its time: the worker lives, but what it computed with does not.
--
-- KEYS[1]  llorch:leases    zset  job id -> when its lease ends, ms of Redis' own clock
-- KEYS[2]  llorch:job:<id>  hash  state, fence
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; a claim that was lost ends nothing
--
-- Returns 1 if the claim was the caller's, else 0.

local record = redis.call('HMGET', KEYS[2], 'state', 'fence')
if record[1] ~= 'claimed' or record[2] ~= ARGV[2] then
  return 0
end
-- A write that cannot grow first: a server at maxmemory then lets the rest through.
redis.call('PERSIST', KEYS[2])
-- Nothing of ours can settle the job any more.
redis.call('HINCRBY', KEYS[2], 'fence', 1)
redis.call('ZADD', KEYS[1], 0, ARGV[1])
return 1
