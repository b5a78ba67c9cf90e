-- The inbox: kombu's lists, to which stock producers push. Their jobs go to those that wait.
--
-- kombu pushes left, so the head is right.

-- Parsing a message takes as long as moving so many bytes.
local MESSAGE_BYTES = 4096
local MOST_BYTES = 4 * 2 ^ 20 -- that a call moves, because Redis answers nobody meanwhile
local AT_ONCE = 2 -- messages that one command takes, each as large as Redis lets a producer make it
local MOST_TENANT_BYTES = 100 -- as contract/job_request.py has it: the name of a tenant is kept with each of his jobs
local MOST_REPEATED = 10 -- ids that a call reports
local LARGE_LIST_BYTES = 2 ^ 20 -- a shorter list has no message that takes long
local MOST_SAMPLED = 16 -- of its messages, newest first

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

-- The record of a message's job, see read_record. If the job `is_new`, also what the message says of it, `tokens`, and
-- the `fields` that its record lacks. A message without a job that Lua can read, or whose id makes the record's key
-- another of our keys, is under its checksum, and the worker that claims it reads it in Python.
local function job_of(message, list)
  local said = read_message(message) or {}
  local job = said.id and read_record(said.id)
  local unread = not job or job.is_strange
  if unread then
    job = read_record('unread-' .. redis.sha1hex(message))
  end
  -- An older version marked jobs so that had come back to a list.
  job.is_new = not job.state or job.state == 'queued'
  if job.is_new then
    local tenant, eta = said[TENANT_HEADER], said.eta
    job.tenant = type(tenant) == 'string' and #tenant <= MOST_TENANT_BYTES and tenant:match('^[%w._-]+$') or ''
    job.eta = type(eta) == 'string' and eta ~= '' and eta
    job.list, job.message, job.unread, job.tokens = list, message, unread, tokens_of(#message)
    job.reads = reads_texts(said)
    job.fields = {'list', list, 'came_ms', whole(now_ms()), 'tenant', job.tenant, 'eta', job.eta or '', 'unread',
      unread and 1 or 0, job.reads and 'reads' or nil, job.reads and 1 or nil}
  end
  return job
end

-- Keep the message of a job.
local function keep_message(job, message)
  if job.staged then
    -- No command copies it.
    redis.call('PERSIST', job.staged)
    redis.call('RENAME', job.staged, message_key(job.id))
  else
    redis.call('SET', message_key(job.id), message)
  end
end

-- The score of a new job at the tail of its class. `starts`: whether it is claimed at once.
local function score_of(job, starts)
  local score, cost = score_at_tail(job.list, job.tenant, job.tokens, job.reads, starts)
  job.fields[#job.fields + 1], job.fields[#job.fields + 2] = 'cost', cost
  return score
end

-- Let a new job wait: at the tail of its class, or at a score that it has.
local function let_come(job, score)
  score = score or score_of(job)
  redis.call('HSET', job_key(job.id), 'state', 'waiting', unpack(job.fields))
  keep_message(job, job.message)
  redis.call('ZADD', waiting_key(model_of(job.list)), score, job.id)
end

-- Drop a message whose job is known.
local function note_copy(job, message, list)
  if job.state == 'ended' and not job.list then
    -- It was cancelled before its message was here. What follows its end needs the message.
    redis.call('HSET', job_key(job.id), 'list', list)
    keep_message(job, message)
    leave_follow_ups(job.id, 0)
  else
    redis.call('HINCRBY', job_key(job.id), 'duplicates', 1)
  end
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

-- Whether a list of so many bytes has few messages, and these are large. A script copies each several times.
local function has_large(key, bytes)
  local length = type(bytes) == 'number' and bytes > LARGE_LIST_BYTES and redis.pcall('LLEN', key)
  return type(length) == 'number' and bytes > length * APART_BYTES
end

-- Take out up to `most` messages; `receive` gets each new job, and makes it wait or run. A list of large ones stays if
-- `leaves` says so of it. Returns how many messages there were; whether some may be left; and the ids of jobs whose
-- messages were dropped because they had ended, the first few.
local function empty_inbox(lists, most, receive, leaves)
  local taken, bytes, repeated = 0, 0, {}
  -- They are nearly always empty, which one command finds.
  local filled = redis.call('EXISTS', unpack(lists))
  for _, key in ipairs(filled > 1 and by_urgency(lists) or lists) do
    local list, before = list_of_priority(key), taken
    -- false: there is none; an error: the user may not ask
    local size = leaves and filled > 0 and redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', MOST_SAMPLED)
    local is_left = has_large(key, size) and leaves(key)
    local is_empty = is_left or size == false
    while filled > 0 and not is_empty and taken < most and bytes < MOST_BYTES do
      local messages = redis.pcall('RPOP', key, AT_ONCE) -- an error: somebody's key of another type
      messages = messages and not messages.err and messages or {}
      is_empty = #messages < AT_ONCE
      for _, message in ipairs(messages) do
        taken, bytes = taken + 1, bytes + #message + MESSAGE_BYTES
        local job = job_of(message, list)
        if job.is_new then
          receive(job)
        else
          if job.state == 'ended' and job.list and #repeated < MOST_REPEATED then
            repeated[#repeated + 1] = job.id
          end
          note_copy(job, message, list)
        end
      end
    end
    filled = filled - ((is_left or taken > before) and 1 or 0)
  end
  return taken, taken >= most or bytes >= MOST_BYTES, repeated
end

-- Wake workers for whatever waits: also for what came with the inbox.
local function wake_for_all(model)
  for _, class in ipairs((classes_that_wait(model))) do
    local reads = redis.call('ZCOUNT', waiting_key(model), bounds_of(class, 'texts')) > 0
    if not reads or redis.call('ZCOUNT', waiting_key(model), bounds_of(class, 'generation')) > 0 then
      wake_class(model, class, false)
    end
    if reads then
      wake_class(model, class, true)
    end
  end
end
