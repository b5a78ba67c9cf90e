-- Put the jobs of dead workers back to the head of their queues.
--
-- Two kinds of jobs may be what killed the worker, and go to the suspects, which run apart: those
-- without progress since their claim, and those that were run again beside others that had lost a
-- worker, and lost this one too. One of the latter is to blame at most, so for all of them this
-- attempt does not count, once: no job ends for what its neighbour does. They stay suspects.
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
  local record = redis.call('HMGET', job, 'state', 'message', 'list', 'progress',
    'company', 'spared')
  if record[1] == 'claimed' then
    redis.call('HINCRBY', job, 'fence', 1)
    redis.call('HSET', job, 'state', 'queued')
    redis.call('HDEL', job, 'message')
    local in_company = record[5] == '1' and not record[6]
    if in_company then
      redis.call('HINCRBY', job, 'attempts', -1)
      redis.call('HSET', job, 'spared', 1)
    end
    if record[4] == '0' or in_company or record[6] then
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
