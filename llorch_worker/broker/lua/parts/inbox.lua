-- The inbox: kombu's lists, to which stock producers push. Their jobs are moved to those that wait.
--
-- kombu pushes left, so the head is right.

-- Parsing a message takes as long as moving so many bytes.
local MESSAGE_BYTES = 4096
local MOST_BYTES = 4 * 2 ^ 20 -- that a call moves, because Redis answers nobody meanwhile
local AT_ONCE = 2 -- messages that one command takes, each as large as Redis lets a producer make it
local MOST_TENANT_BYTES = 100 -- as contract/job_request.py has it: the name of a tenant is kept with each of his jobs
local STOCK_TOKENS = 256 -- that a job of a stock producer makes, as far as anybody knows without its body

-- The list of the priority that a job has in an inbox list: a step between normal and low is normal, and ':' between
-- queue and priority, as Celery's documentation advises, means the same as kombu's own separator.
local function list_of_priority(key)
  local queue, step = key:match('^(.*):(%d)$')
  if not queue then
    queue, step = key:match('^(.*)' .. STEP_SEPARATOR .. '(%d)$')
  end
  if not queue then
    return key
  end
  return queue .. (STEP_SEPARATOR .. step == LOW_SUFFIX and class_of(queue) ~= HIGH and LOW_SUFFIX or '')
end

local function weight_of(tenant, weights)
  for name, value in weights:gmatch('([%w._-]+)=(%d+)') do
    if name == tenant then
      return tonumber(value)
    end
  end
  return 1
end

-- Make the record of a message's job. A message without a job that Lua can read, or whose id makes the record's key
-- another of our keys, is under its checksum, and the worker that claims it reads it in Python. `score`: that of a
-- message that comes from there; `starts`: whether it is settled at once, and that writes its record. Returns its record
-- and score, for the caller to let it wait; or nil and, if the message repeats that of a job that has ended, its id.
local function accept(message, list, weights, score, starts)
  local said = read_message(message) or {}
  local id, record = said.id, said.id and redis.pcall('HMGET', job_key(said.id), 'state', 'list')
  local unread = not record or record.err
  if unread then
    id = 'unread-' .. redis.sha1hex(message)
    record = redis.call('HMGET', job_key(id), 'state', 'list')
  end
  -- An older version marked jobs so that had come back to a list.
  local is_known = record[1] == 'queued'
  local job, state = job_key(id), not is_known and record[1]
  starts = starts and not is_known
  if state == 'ended' and not record[2] then
    -- It was cancelled before its message was here. What follows its end needs the message.
    redis.call('HSET', job, 'list', list)
    redis.call('SET', message_key(id), message)
    leave_follow_ups(id, 0)
    return nil
  elseif state then
    redis.call('HINCRBY', job, 'duplicates', 1)
    return nil, state == 'ended' and id or nil
  end
  local tenant = type(said[TENANT_HEADER]) == 'string' and #said[TENANT_HEADER] <= MOST_TENANT_BYTES
    and said[TENANT_HEADER]:match('^[%w._-]+$') or ''
  local eta = type(said.eta) == 'string' and said.eta or ''
  local model, tokens = model_of(list), #message / 4 + STOCK_TOKENS
  local fields = {'list', list, 'came_ms', string.format('%.0f', now_ms()), 'tenant', tenant, 'eta', eta, 'unread',
    unread and 1 or 0}
  local cost
  if not score then
    score, cost = score_at_tail(model, class_of(list), tenant, tokens, weight_of(tenant, weights), starts)
  end
  if not starts then
    redis.call('HSET', job, 'state', 'waiting', 'cost', cost or 0, unpack(fields))
  end
  redis.call('SET', message_key(id), message)
  return {id = id, state = 'waiting', fields = starts and fields, list = list, message = message, eta = eta ~= '' and eta, unread = unread,
    retried_ms = false, attempts = 0, history = '', fence = 0, deaths = 0, needs_fingerprint = '', least_context = 0},
    score
end

-- The lists with the most urgent first.
local function by_urgency(lists)
  local sorted = {}
  for class = HIGH, LOW do
    for _, key in ipairs(lists) do
      if class_of(list_of_priority(key)) == class then
        sorted[#sorted + 1] = key
      end
    end
  end
  return sorted
end

-- Move up to `most` jobs. `settle`, if any, gets the first job, with its score, which then does not wait.
-- Returns how many; the ids of messages whose jobs had ended, the first few; and whether some may be left.
local MOST_REPEATED = 10
local function move_inbox(lists, most, weights, settle)
  local moved, bytes, repeated = 0, 0, {}
  -- They are nearly always empty, which one command finds.
  local filled = redis.call('EXISTS', unpack(lists))
  for _, key in ipairs(filled > 1 and by_urgency(lists) or lists) do
    if filled == 0 then
      break
    end
    local list, before, scores, is_empty = list_of_priority(key), moved, {}, false
    while not is_empty and moved < most and bytes < MOST_BYTES do
      local messages = redis.pcall('RPOP', key, AT_ONCE) -- an error: somebody's key of another type
      messages = messages and not messages.err and messages or {}
      is_empty = #messages < AT_ONCE
      for _, message in ipairs(messages) do
        moved, bytes = moved + 1, bytes + #message + MESSAGE_BYTES
        local job, found = accept(message, list, weights, nil, settle)
        if job and job.fields then
          settle(job, tonumber(found))
        elseif job then
          scores[#scores + 1], scores[#scores + 2] = found, job.id
        elseif found and #repeated < MOST_REPEATED then
          repeated[#repeated + 1] = found
        end
        settle = nil
      end
    end
    if #scores > 0 then
      redis.call('ZADD', waiting_key(model_of(list)), unpack(scores))
    end
    filled = filled - (moved > before and 1 or 0)
  end
  return moved, repeated, moved >= most or bytes >= MOST_BYTES
end
