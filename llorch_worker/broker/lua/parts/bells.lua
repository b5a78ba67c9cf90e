-- Waking workers: see doorbell.py.

-- How long the worker that was rung for a job has to claim it, before the watcher rings for another.
local FRESH_MS = 50
local RING_S = 60 -- how long the ring of a worker's own bell stays: the worker may never return

-- The bell of the queue that a list belongs to. Suspects and scheduled jobs may be any worker's.
local function bell_of(list)
  local queue, suffix = list:match('^([^' .. SUFFIX_MARKS .. ']*)([^' .. STEP_SEPARATOR .. ']*)')
  queue = queue .. (suffix == HIGH_SUFFIX and suffix or '')
  return bell_key(queue)
end

-- Whether the jobs behind this bell are of high priority.
local function is_high(bell)
  return bell:sub(-#HIGH_SUFFIX) == HIGH_SUFFIX
end

-- Whether workers without room hear of the jobs behind this bell: see doorbell.py.
local function rings_for_full(bell)
  return is_high(bell) and not bell:find(WORKER_MARK, 1, true)
end

local function ring_once(bell)
  local only = redis.call('LPUSH', bell, 1) == 1
  if not only then
    redis.call('LPOP', bell)
  end
  return only
end

-- Wake the worker that has waited longest. If none waits, the ring stays for the next; one is enough,
-- because whoever takes it looks at everything and rings again if jobs are left. Returns whether it was
-- the only ring.
local function ring(bell)
  local only = ring_once(bell)
  if rings_for_full(bell) then
    ring_once(bell .. FULL_SUFFIX)
  end
  if bell:find(WORKER_MARK, 1, true) then
    redis.call('EXPIRE', bell, RING_S)
  end
  return only
end
