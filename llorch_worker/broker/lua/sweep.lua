-- Put the jobs of dead workers back to the head of their queues.
--
-- A job without progress since its claim may be what killed the worker: it goes to the suspects.
--
-- KEYS[1]  llorch:leases  zset  job id -> when its lease ends, ms of Redis' own clock
-- ARGV[1]  the most jobs to look at, so that one call stays short
-- Touches  llorch:job:<id>, the lists named there, llorch.<model>:suspects
--
-- Returns the ids put back.

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local back = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])) do
  redis.call('ZREM', KEYS[1], id)
  local job = 'llorch:job:' .. id
  local record = redis.call('HMGET', job, 'state', 'message', 'list', 'progress')
  if record[1] == 'claimed' then
    redis.call('HINCRBY', job, 'fence', 1)
    redis.call('HSET', job, 'state', 'queued')
    redis.call('HDEL', job, 'message')
    if record[4] == '0' then
      -- llorch.<model>, :high or a priority step cut off
      local model = record[3]:gsub('\6\22%d+$', ''):gsub(':high$', '')
      redis.call('LPUSH', model .. ':suspects', record[2])
    else
      redis.call('RPUSH', record[3], record[2])
    end
    back[#back + 1] = id
  end
end
return back
