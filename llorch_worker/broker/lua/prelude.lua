-- What the scripts share. The loader (scripts.py) puts it before each of them, and before it the
-- names of keys and queues: LEASES, job_key(job_id), ... from keys.py and queues.py.

local function now_us()
  local clock = redis.call('TIME')
  return clock[1] * 1000000 + clock[2]
end

-- Leases, deadlines and letters all use Redis' own clock.
local function now_ms()
  return math.floor(now_us() / 1000)
end

-- Let the script write at maxmemory. Redis refuses scripts there whose first write may grow; this
-- one cannot. Jobs in hand must go on, because their ends make room.
local function allow_writes()
  redis.call('PERSIST', LEASES)
end

local function is_claimed(job_id, fence)
  local record = redis.call('HMGET', job_key(job_id), 'state', 'fence')
  return record[1] == 'claimed' and record[2] == fence
end

-- Store a job's state for ttl_s seconds, in the key and format of Celery's Redis backend.
local function store_state(job_id, document, ttl_s)
  redis.call('SET', result_key(job_id), document, 'EX', ttl_s)
  -- As Celery's own backend does: it wakes AsyncResult.get().
  redis.call('PUBLISH', result_key(job_id), document)
end

-- Write events to a job's stream as entries `first`-0, `first` + 1-0, ... and an end event, if
-- any, after them. Entries that exist are passed over, so a write whose answer was lost can be sent
-- again. Each entry has one field, `event`.
local function write_events(job_id, first, events, end_event, ttl_s)
  local stream = events_key(job_id)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  local number = last and tonumber(last[1]:match('^%d+')) or 0
  for i, event in ipairs(events) do
    if first + i - 1 > number then
      number = first + i - 1
      redis.call('XADD', stream, string.format('%d-0', number), 'event', event)
    end
  end
  if end_event then
    redis.call('XADD', stream, string.format('%d-0', number + 1), 'event', end_event)
  end
  redis.call('EXPIRE', stream, ttl_s)
end

-- Write the last events of a job. A stream key that somebody else wrote to must not cost the result
-- or what a script popped: its errors are ignored.
local function end_stream(job_id, end_event, ttl_s, first, events)
  pcall(write_events, job_id, first, events or {}, end_event, ttl_s)
end

-- Keep a dead letter: {id, reason, message, list, attempts, history}. The message must be UTF-8.
local function bury(letter, most_letters)
  letter.at_ms = now_ms()
  -- The trim comes first, because the push grows; see allow_writes.
  redis.call('LTRIM', DEAD_LETTERS, 0, most_letters - 2)
  redis.call('LPUSH', DEAD_LETTERS, cjson.encode(letter))
end
