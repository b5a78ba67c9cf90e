-- Waking workers: see wake_ups.py.

local WAKE_UP_S = 60 -- how long a wake-up for one worker stays: it may never return

-- The wake key for the jobs of a class: high jobs have one of their own. Those who claim nothing but texts wait at keys
-- of their own, which get a wake-up together with the others.
local function wake_key_of_class(model, class, kind)
  local suffix = (class == HIGH and HIGH_SUFFIX or '') .. (kind == 'texts' and TEXTS_SUFFIX or '')
  return wake_key(QUEUE_PREFIX .. model .. suffix)
end

-- The wake key of workers without room.
local function full_wake_key(model, kind)
  return wake_key_of_class(model, HIGH, kind) .. FULL_SUFFIX
end

-- A wake-up; a key holds at most one. Returns whether it held none before.
local function wake_once(key)
  local only = redis.call('LPUSH', key, 1) == 1
  if not only then
    redis.call('LPOP', key)
  end
  return only
end

-- Wake the worker that has waited longest. If none waits, the wake-up stays for the next; one is enough,
-- because whoever takes it looks at everything and wakes another if jobs are left. `reads`: for a job that reads texts.
local function wake_class(model, class, reads)
  for _, kind in ipairs({'any', reads and 'texts' or nil}) do
    for _, key in ipairs({wake_key_of_class(model, class, kind), class == HIGH and full_wake_key(model, kind) or nil}) do
      wake_once(key)
      if kind == 'texts' then
        redis.call('EXPIRE', key, WAKE_UP_S) -- most workers wait for all at one key
      end
    end
  end
end

local function wake(list, reads)
  wake_class(model_of(list), class_of(list), reads)
end

-- Wake one worker. Returns whether it has answered all wake-ups before.
local function wake_place(place)
  local key = wake_key(place)
  local only = wake_once(key)
  redis.call('EXPIRE', key, WAKE_UP_S)
  return only
end
