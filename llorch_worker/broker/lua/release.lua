-- End a claim: the job is over, or it goes back to the head of its queue.
--
-- KEYS[1]  llorch:leases    zset  job id -> when its lease ends, ms of Redis' own clock
-- KEYS[2]  llorch:job:<id>  hash  state, fence, attempts, message, list
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; a claim that was lost releases nothing
-- ARGV[3]  'ended', or 'queued' to hand the job back; a drain's attempt does not count
-- ARGV[4]  seconds that the record of an ended job is kept
-- Touches  the list named in the record
--
-- Returns 1 if the claim was the caller's, else 0.

local record = redis.call('HMGET', KEYS[2], 'state', 'fence', 'message', 'list')
if record[2] ~= ARGV[2] then
  return 0
end
if ARGV[3] == 'ended' then
  -- A stored result has ended the job already; what is left of the claim goes.
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], 'message', 'list')
  redis.call('HSET', KEYS[2], 'state', 'ended')
  redis.call('EXPIRE', KEYS[2], ARGV[4])
  return 1
end
if record[1] ~= 'claimed' then
  return 0
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], 'message')
-- The next writer has another fence, whatever of ours is still under way.
redis.call('HINCRBY', KEYS[2], 'fence', 1)
redis.call('HINCRBY', KEYS[2], 'attempts', -1)
redis.call('HSET', KEYS[2], 'state', 'queued')
redis.call('RPUSH', record[4], record[3])
return 1
