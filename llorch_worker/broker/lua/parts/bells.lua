-- Waking workers: see doorbell.py.

local RING_S = 60 -- how long the ring of a worker's own bell stays: the worker may never return

-- The bell of the queue that a list belongs to. Suspects and scheduled jobs may be any worker's.
local function bell_of(list)
  local queue = list:match('^[^' .. STEP_SEPARATOR .. ']*')
  for _, suffix in ipairs({SUSPECTS_SUFFIX, SCHEDULED_SUFFIX}) do
    if queue:sub(-#suffix) == suffix then
      queue = queue:sub(1, -#suffix - 1)
    end
  end
  return bell_key(queue)
end

-- Wake the worker that has waited longest. If none waits, the ring stays for the next; one is enough,
-- because whoever takes it looks at everything and rings again if jobs are left.
local function ring(bell)
  if redis.call('LPUSH', bell, 1) > 1 then
    redis.call('LPOP', bell)
  end
  if bell:find(WORKER_MARK, 1, true) then
    redis.call('EXPIRE', bell, RING_S)
  end
end
