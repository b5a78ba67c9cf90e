-- Move jobs from the queues of workers that are gone into the queue of their model.
--
-- Each priority's list goes to the tail of its counterpart, in its order. A queue stays known for a
-- while: a producer may still send there.
--
-- ARGV[1]   ms after which a worker that was not seen is gone
-- ARGV[2]   ms after which its queue is not looked at any more
-- ARGV[3]   the most queues that are remembered
-- ARGV[4]   the most jobs to move, so that one call stays short
-- ARGV[5..] what follows a queue's name in the names of its lists, the most urgent first
--
-- Returns pairs: queue, jobs moved.

local gone_ms, forgotten_ms, most_queues, left = unpack(ARGV, 1, 4)
left = tonumber(left)
local now = now_ms()
local moved = {}
allow_writes()
for _, queue in ipairs(redis.call('ZRANGEBYSCORE', WORKER_QUEUES, '-inf', now - gone_ms)) do
  local count = 0
  local lists = {}
  for i = 5, #ARGV do
    lists[#lists + 1] = queue .. ARGV[i]
  end
  -- Most are empty, and there may be many.
  if redis.call('EXISTS', unpack(lists)) > 0 then
    for _, list in ipairs(lists) do
      while left > 0 and redis.call('RPOPLPUSH', list, shared_list(list)) do
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
  redis.call('ZREMRANGEBYSCORE', WORKER_QUEUES, '-inf', now - forgotten_ms)
  redis.call('ZREMRANGEBYRANK', WORKER_QUEUES, 0, -1 - most_queues)
end
return moved
