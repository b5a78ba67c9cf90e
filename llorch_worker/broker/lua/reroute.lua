-- Put what waits in the own queues of workers that are gone into the queue of their model.
--
-- Each priority's list goes to the tail of its counterpart, in its order.
--
-- KEYS[1]  llorch:own_queues  zset  own queue -> when its worker was last seen, ms of Redis' own clock
-- ARGV[1]  ms after which a worker that was not seen is gone
-- ARGV[2]  ms after which its queue is not looked at any more
-- ARGV[3]  the most queues that are remembered
-- ARGV[4]  the most jobs to move, so that one call stays short
-- Touches  llorch.<model>@<worker>, with :high and every priority step, and the same without @<worker>
--
-- A queue stays known for a while: a producer may still send there.
--
-- Returns pairs: own queue, jobs moved.

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local left = tonumber(ARGV[4])
-- A write that cannot grow first: a server at maxmemory then lets the rest through.
redis.call('PERSIST', KEYS[1])
local moved = {}
for _, queue in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[1])) do
  local count = 0
  local own = {}
  for i, suffix in ipairs({':high', '', '\6\0223', '\6\0226', '\6\0229'}) do
    own[i] = queue .. suffix
  end
  -- Most are empty, and there may be many.
  if redis.call('EXISTS', unpack(own)) > 0 then
    for _, list in ipairs(own) do
      local shared = list:gsub('@[^:\6]*', '')
      while left > 0 and redis.call('RPOPLPUSH', list, shared) do
        left = left - 1
        count = count + 1
      end
    end
  end
  if count > 0 then
    moved[#moved + 1] = queue
    moved[#moved + 1] = count
  end
end
if left > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[3])
end
return moved
