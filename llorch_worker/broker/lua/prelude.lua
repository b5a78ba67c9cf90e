-- Code that all scripts share. The names of keys and queues (LEASES, job_key(job_id), ...) come from keys.py
-- and queues.py: see scripts.py.

-- Read once: a script is one moment.
local clock_us
local function now_us()
  if not clock_us then
    local clock = redis.call('TIME')
    clock_us = clock[1] * 1000000 + clock[2]
  end
  return clock_us
end

-- Leases, deadlines and letters all use Redis' own clock.
local function now_ms()
  return math.floor(now_us() / 1000)
end

-- Shorten leases that a clock set back has left too far in the future. A job's may be longer than the
-- caller's; what is no job, a batch, has the caller's. `most`: how many, or -1 for all.
local function shorten(leases, lease_ms, most)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. now_ms() + lease_ms, '+inf', 'LIMIT',
      0, most)) do
    local own_ms = tonumber(redis.call('HGET', job_key(id), 'lease_ms') or lease_ms)
    if tonumber(redis.call('ZSCORE', leases, id)) > now_ms() + own_ms then
      redis.call('ZADD', leases, now_ms() + own_ms, id)
    end
  end
end

local function is_claimed(job_id, fence)
  local record = redis.call('HMGET', job_key(job_id), 'state', 'fence')
  return record[1] == 'claimed' and record[2] == fence
end

-- Store a job's end for ttl_s seconds, or without ttl_s a state before it, in the key and format of
-- Celery's Redis backend.
local function store_state(job_id, document, ttl_s)
  local result = result_key(job_id)
  if ttl_s then
    redis.call('SET', result, document, 'EX', ttl_s)
  else
    redis.call('SET', result, document)
  end
  -- Like Celery's own backend, to wake AsyncResult.get().
  redis.call('PUBLISH', result, document)
end

-- Whether the reply that holds a stored state says that the job is revoked.
local function is_revoke(document)
  return type(document) == 'string' and document:find('"status": "REVOKED"', 1, true)
end

-- Whether a worker of another application has stored a revoke of this job. Celery's workers do so for
-- every task that they hear of, and know nothing of the record.
local function is_revoked_elsewhere(id)
  return is_revoke(redis.pcall('GET', result_key(id)))
end

-- Store a state, unless a revoke is there: somebody may have read that, and a result does not change. It stays
-- for keep_s seconds, and the state for ttl_s, or without ttl_s until the next. Returns whether it is stored.
local function store_unless_revoked(job_id, document, keep_s, ttl_s)
  local result = result_key(job_id)
  local expires = ttl_s and {'EX', ttl_s} or {}
  local before = redis.pcall('SET', result, document, 'GET', unpack(expires))
  if is_revoke(before) then
    redis.call('SET', result, before, 'EX', keep_s)
    return false
  elseif type(before) == 'table' then -- an error: the key is of another type
    store_state(job_id, document, ttl_s)
  else
    redis.call('PUBLISH', result, document)
  end
  return true
end

-- The number of the last entry of a job's stream, 0 if it has none; nil if the key is no stream. Read
-- once.
local last_numbers = {}
local function last_number(job_id)
  if not last_numbers[job_id] then
    local entries = redis.pcall('XREVRANGE', events_key(job_id), '+', '-', 'COUNT', 1)
    if entries.err then
      return nil
    end
    last_numbers[job_id] = entries[1] and tonumber(entries[1][1]:match('^%d+')) or 0
  end
  return last_numbers[job_id]
end

-- Whether a claim's earlier entries, before entry `first`, are missing from the stream, because Redis
-- lost its last writes. A claim's first entry may have the number of its fence.
local function has_gap(job_id, fence, first)
  if first == fence then
    return false
  end
  local last = last_number(job_id)
  return last and tonumber(first) > last + 1
end

-- Write events to a job's stream as entries `first`-0, `first` + 1-0, ... and an end event, if
-- any, after them. Existing entries are skipped, so a write whose reply was lost can be sent again.
-- Each entry has one field, `event`. `call` is redis.call, or redis.pcall to ignore refused writes.
-- The stream is the job's journal, so it begins to expire, in ttl_s seconds, only with the job's end.
--
-- What is new is also published for those who read the stream: see keys.events_channel. Returns how many
-- heard it.
local function write_events(call, job_id, first, events, end_event, ttl_s)
  local stream = events_key(job_id)
  local new = {} -- the number of the first new entry, then the events
  local function add(by, number, event)
    local added = type(by('XADD', stream, string.format('%d-0', number), 'event', event)) == 'string'
    if added then
      new[1] = new[1] or string.format('%d', number)
      new[#new + 1] = event
    end
    return added
  end
  local number = last_numbers[job_id]
  -- Mostly there are only earlier entries. Then the first event shows this by going in.
  if not number and events[1] and add(redis.pcall, first, events[1]) then
    number = tonumber(first)
  end
  number = number or last_number(job_id) or 0
  for i, event in ipairs(events) do
    local at = first + i - 1
    if at > number then
      number = at
      add(call, number, event)
    end
  end
  if end_event then
    add(call, number + 1, end_event)
    call('EXPIRE', stream, ttl_s)
  end
  -- A user who may not publish there loses no write by it.
  local heard = new[1] and redis.pcall('PUBLISH', events_channel(job_id), table.concat(new, '\n'))
  return type(heard) == 'number' and heard or 0
end

-- Write the last events of a job. Each refused write is ignored: a stream key of the wrong type must
-- not cost the result or a popped message. The stream expires in any case.
local function end_stream(job_id, end_event, ttl_s, first, events)
  write_events(redis.pcall, job_id, first, events or {}, end_event, ttl_s)
end

-- Leave it to a worker to do what Celery does after a task's end: see follow_ups.py. The record and the message
-- stay until a worker has done it.
local function leave_follow_ups(job_id, at_ms)
  redis.call('PERSIST', job_key(job_id))
  redis.call('ZADD', FOLLOW_UPS, at_ms, job_id)
end

-- The record and the idempotency key of a job that has ended expire after keep_s and key_s seconds, and its message
-- goes, unless a worker has more to do from `follow_ups_ms` on. The caller may know the key, or with false that
-- there is none.
local function end_record(job_id, keep_s, key_s, idempotency, follow_ups_ms)
  local job = job_key(job_id)
  redis.call('HSET', job, 'state', 'ended')
  if follow_ups_ms then
    leave_follow_ups(job_id, follow_ups_ms)
  else
    redis.call('DEL', message_key(job_id))
    redis.call('EXPIRE', job, keep_s)
  end
  if idempotency == nil then
    idempotency = redis.call('HGET', job, 'idempotency')
  end
  if idempotency then
    redis.call('EXPIRE', idempotency, key_s)
  end
end
