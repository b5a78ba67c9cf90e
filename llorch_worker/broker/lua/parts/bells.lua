-- Waking workers: see doorbell.py.

local RING_S = 60 -- how long the ring of a worker's own bell stays: the worker may never return

-- The bell for the jobs of a class: high jobs have one of their own.
local function bell_of_class(model, class)
  return bell_key(QUEUE_PREFIX .. model .. (class == HIGH and HIGH_SUFFIX or ''))
end

-- The bell of workers without room.
local function full_bell(model)
  return bell_of_class(model, HIGH) .. FULL_SUFFIX
end

-- A ring; at most one is in a bell. Returns whether it is the only one.
local function ring_once(bell)
  local only = redis.call('LPUSH', bell, 1) == 1
  if not only then
    redis.call('LPOP', bell)
  end
  return only
end

-- Wake the worker that has waited longest. If none waits, the ring stays for the next; one is enough,
-- because whoever takes it looks at everything and rings again if jobs are left.
local function ring_class(model, class)
  ring_once(bell_of_class(model, class))
  if class == HIGH then
    ring_once(full_bell(model))
  end
end

local function ring(list)
  ring_class(model_of(list), class_of(list))
end

-- Wake one worker. Returns whether it has answered all rings before.
local function ring_place(place)
  local bell = bell_key(place)
  local only = ring_once(bell)
  redis.call('EXPIRE', bell, RING_S)
  return only
end
