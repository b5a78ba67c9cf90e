-- Waking workers: see wake_ups.py.

local WAKE_UP_S = 60 -- how long a wake-up stays that perhaps nobody takes: one for one worker, who may never return

-- The wake key for the jobs of a class: high jobs have one of their own. Those who claim nothing but texts wait at keys
-- of their own.
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

-- At whose keys those wait who may claim a job of the model: one that `reads` texts, or that generates. If the model does
-- both, as its card says, its workers claim each kind by itself. If it only generates, the older card of another worker
-- may have said that it reads texts, too: then both are woken.
local function kinds_woken(model, reads)
  local tasks = reads and card_of(model):match('"tasks":%[([^%]]*)') or ''
  local generates = tasks:find(TASK, 1, true)
  if not reads or tasks ~= '' and not generates then
    return {'any'}
  end
  return tasks:find(',', 1, true) and {'texts'} or {'any', 'texts'}
end

-- Wake the worker that has waited longest. If none waits, the wake-up stays for the next; one is enough,
-- because whoever takes it looks at everything and wakes another if jobs are left. `reads`: for a job that reads texts.
local function wake_class(model, class, reads)
  local kinds = kinds_woken(model, reads)
  for _, kind in ipairs(kinds) do
    for _, key in ipairs({wake_key_of_class(model, class, kind), class == HIGH and full_wake_key(model, kind) or nil}) do
      wake_once(key)
      if kind == 'texts' and #kinds > 1 then
        redis.call('EXPIRE', key, WAKE_UP_S) -- perhaps nobody waits there
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
