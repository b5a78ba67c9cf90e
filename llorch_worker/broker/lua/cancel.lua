-- Cancel a job wherever it is: one that waits ends here, one that runs is told to its worker.
--
-- Claims are scripts too, so a job is on one side or the other: it cannot slip through between.
--
-- KEYS[1]  llorch:job:<id>         hash    state, fence, list, message
-- KEYS[2]  llorch:job:<id>:events  stream
-- KEYS[3]  celery-task-meta-<id>   string
-- KEYS[4]  llorch:job:<id>:cancel  string  what a worker that takes over finds
-- KEYS[5]  llorch:leases           zset    job id -> when its lease ends, ms of Redis' own clock
-- ARGV[1]  job id
-- ARGV[2]  result of a cancelled job, in the format of Celery's Redis backend
-- ARGV[3]  its last event
-- ARGV[4]  seconds that results are kept
-- ARGV[5]  seconds that an event stream is kept
-- ARGV[6]  seconds that the record of a job cancelled here is kept: its message stays in the queue
--          until its turn, and is dropped then because of this record
-- ARGV[7]  the channel on which workers hear of cancels
--
-- Returns 'queued' (it has ended now and never runs), 'running' (asked) or 'ended' (it was over).

local state = redis.call('HGET', KEYS[1], 'state')
if state == 'ended' or not state and redis.call('EXISTS', KEYS[3]) == 1 then
  return 'ended'
end
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local lease_ms = tonumber(redis.call('ZSCORE', KEYS[5], ARGV[1]) or '0')
if state == 'claimed' and lease_ms > now_ms then
  -- A write that cannot grow first: a server at maxmemory then lets the rest through.
  redis.call('PERSIST', KEYS[1])
  redis.call('SET', KEYS[4], 1, 'EX', ARGV[4])
  redis.call('PUBLISH', ARGV[7], ARGV[1])
  return 'running'
end
-- It waits, or its worker is dead and nobody swept it up yet.
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('SET', KEYS[3], ARGV[2], 'EX', ARGV[4])
redis.call('PUBLISH', KEYS[3], ARGV[2])
-- Protected: a stream key that somebody else wrote to must not cost the result.
local entries = redis.pcall('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
if not entries.err then
  local number = (entries[1] and tonumber(entries[1][1]:match('^%d+')) or 0) + 1
  redis.pcall('XADD', KEYS[2], string.format('%d-0', number), 'event', ARGV[3])
  redis.call('EXPIRE', KEYS[2], ARGV[5])
end
redis.call('HSET', KEYS[1], 'state', 'ended')
redis.call('HINCRBY', KEYS[1], 'fence', 1)
redis.call('HDEL', KEYS[1], 'list', 'message')
redis.call('EXPIRE', KEYS[1], ARGV[6])
return 'queued'
