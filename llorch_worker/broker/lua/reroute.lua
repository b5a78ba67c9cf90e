-- Move jobs from the worker queues of workers that are gone into the model's shared queues.
--
-- Each priority's list goes to the tail of its counterpart, in order. A queue stays known for a
-- while, because a producer may still send to it.
--
-- KEYS: the model's workers.
--
-- Returns {queue, jobs moved} for each queue with jobs.
--
-- Parts: lists, message
-- Writes at maxmemory.

local gone_ms = ARGV[1] -- a worker not seen for this long is gone: jobs that were handed over to it move
local lost_ms = ARGV[2] -- after this long, all its jobs
local forgotten_ms = ARGV[3] -- after this long its queue is forgotten
local most_queues = ARGV[4] -- the most queues to remember
local left = tonumber(ARGV[5]) -- the most jobs to move, so that one call stays short
local suffixes = {unpack(ARGV, 6)} -- from a queue's name to its lists, the most urgent first

local now = now_ms()
local moved = {}
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - gone_ms)
if #gone == 0 then
  return moved
end
for _, queue in ipairs(gone) do
  local count = 0
  local lists = {}
  for i, suffix in ipairs(suffixes) do
    lists[i] = queue .. suffix
  end
  -- Most are empty, and there may be many.
  if redis.call('EXISTS', unpack(lists)) > 0 then
    local all = tonumber(redis.call('ZSCORE', KEYS[1], queue)) <= now - lost_ms
    for _, list in ipairs(lists) do
      local moves = left > 0 and takes_jobs(list) and takes_jobs(shared_list(list))
      local messages = moves and redis.call('LRANGE', list, -left, -1) or {}
      for i = #messages, 1, -1 do
        local job = not all and read_message(messages[i])
        if all or job and redis.pcall('HGET', job_key(job.id), 'state') == 'queued' then
          redis.call('LREM', list, -1, messages[i])
          redis.call('LPUSH', shared_list(list), messages[i])
          left = left - 1
          count = count + 1
        end
      end
    end
  end
  if count > 0 then
    moved[#moved + 1] = {queue, count}
  end
end
if left > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - forgotten_ms)
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - most_queues)
end
return moved
