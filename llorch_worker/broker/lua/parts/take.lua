-- Settling a popped message: as a claim, a dead letter, or nothing.
--
-- `terms` are the caller's, by name: see claims.py.

-- Fills in a template, which names the job once. Finding that place is faster than gsub.
local function document_of(template, job_id)
  local first, last = template:find('@ID@', 1, true)
  local id_json = job_id:find('[^%w-]') and cjson.encode(job_id):sub(2, -2) or job_id
  return template:sub(1, first - 1) .. id_json .. template:sub(last + 1)
end

-- Whether the job is a suspect: see release.lua. In its last attempt of all a job is one whatever it does.
local function is_suspect(record, terms)
  return record.strikes and record.progress ~= '1'
    or record.deaths > 0 and record.deaths >= terms.max_deaths - 1
end

local function read_record(id)
  local fields = redis.pcall('HMGET', job_key(id), 'state', 'attempts', 'history', 'list', 'fence',
    'deaths', 'strikes', 'progress', 'idempotency', 'first_claim_ms', 'retried_ms', 'eta_ms', 'sent')
  if fields.err then
    -- The id is such that the record's key is another of our keys.
    return nil
  end
  return {
    state = fields[1], attempts = tonumber(fields[2] or 0), history = fields[3] or '',
    list = fields[4], fence = tonumber(fields[5] or 0), deaths = tonumber(fields[6] or 0),
    strikes = tonumber(fields[7] or nil), progress = fields[8], idempotency = fields[9],
    first_claim_ms = fields[10], retried_ms = fields[11], eta_ms = fields[12], sent = fields[13],
  }
end

-- Whether the job has had all its attempts.
local function is_exhausted(record, terms)
  -- Without a death the terms need not be decoded.
  return record.deaths > 0
    and (record.deaths >= terms.max_deaths or (record.strikes or 0) >= terms.max_attempts)
end

-- End a job whose attempts are used up.
local function exhaust(id, message, list, record, terms)
  bury({id = id, message_bytes = #message, reason = 'attempts exhausted', message = message, list = list,
    attempts = record.attempts, history = record.history}, terms.letters_bytes, terms.most_letters)
  end_record(id, terms.keep_s, terms.keep_s)
  store_state(id, document_of(terms.failure, id), terms.keep_s)
  end_stream(id, terms.end_event, terms.stream_s)
  leave_follow_ups(id, message, 0)
end

local begun = 0

-- Claim a job. Returns its id, message, attempts, fence, list, ms of its first claim and of this one, 1 if this is
-- the first, 1 if a cancel was requested, 1 if it is a suspect, its ETA (in ms if it has waited for it, else as the
-- message has it, or nil), ms of its retry, or nil, and 1 if Python is to read the message.
local function begin(found, message, list, terms)
  -- Of jobs that are claimed together, the later has the greater fence.
  local id, record, job, now = found.id, found.record, job_key(found.id), now_us() + begun
  begun = begun + 1
  local claimed_ms = math.floor(now / 1000)
  -- Taken from the clock rather than counted from 1: a claim that a failover lost, or an older state of
  -- Redis, must not have the same fence as the next one. Nor must it where the clock is behind.
  local fence = string.format('%d', now > record.fence and now or record.fence + 1 + terms.fence_step)
  local suspect = is_suspect(record, terms) and 1 or 0
  local claimed = string.format('%d', claimed_ms)
  local attempts = string.format('%d', record.attempts + 1)
  local first_claim_ms = record.first_claim_ms or claimed
  redis.call('HSET', job, 'state', 'claimed', 'fence', fence, 'message', message, 'list', list,
    'attempts', attempts, 'worker', terms.worker, 'lease_ms', terms.lease_ms, 'progress', '0',
    'history', record.history .. terms.worker .. ' ' .. claimed .. '\n',
    'first_claim_ms', first_claim_ms, 'place', terms.place)
  redis.call('PERSIST', job)
  if record.idempotency then
    redis.call('PERSIST', record.idempotency)
  end
  redis.call('ZADD', LEASES, string.format('%d', claimed_ms + terms.lease_ms), id)
  -- A worker claims only what it has room for, so a job starts with its claim, unless it is put back at once.
  local eta_ms = tonumber(record.eta_ms or nil)
  if eta_ms or not found.eta and not found.is_unread then
    store_state(id, document_of(terms.started, id))
  end
  -- A cancel of a job that was never claimed ends it.
  local cancelled = record.first_claim_ms and redis.call('EXISTS', cancel_key(id)) or 0
  return {id, message, attempts, fence, list, first_claim_ms, claimed,
    record.first_claim_ms and 0 or 1, cancelled, suspect, eta_ms or found.eta, record.retried_ms,
    found.is_unread and 1 or 0}
end

-- The job of a message, with its record. A message that cannot be read yet, or whose id makes the record's key
-- another of our keys, is claimed under its checksum, and read by Python.
local function read_job(message)
  local said = read_message(message) or {}
  local id, record = said.id, said.id and read_record(said.id)
  local is_unread = not record
  if is_unread then
    id = 'unread-' .. redis.sha1hex(message)
    record = read_record(id)
  end
  local follow = record.state == 'ended' and redis.call('HGET', job_key(id), 'follow')
  return {
    id = id, record = record, is_unread = is_unread, follow = follow,
    eta = type(said.eta) == 'string' and said.eta, tenant = said[TENANT_HEADER],
    -- Whether it was in somebody's hands before.
    came_back = record.state == 'queued' or follow == 'back',
  }
end

-- The claims of this `call`, if it was the caller's last that took jobs, as `begin` returned them; nil if it was
-- another. Its reply was lost, so nobody has seen them yet.
local function begun_by(call, call_key, terms)
  local noted = redis.pcall('GET', call_key)
  local known = type(noted) == 'string' and cjson.decode(noted)
  if not known or known[1] ~= call then
    return nil
  end
  local again = {}
  for place = 2, #known, 2 do
    local id, fence = known[place], known[place + 1]
    local fields = redis.call('HMGET', job_key(id), 'state', 'fence', 'message')
    if fields[1] == 'claimed' and fields[2] == fence then
      local found = read_job(fields[3])
      local record = found.record
      redis.call('ZADD', LEASES, string.format('%d', now_ms() + terms.lease_ms), id)
      again[#again + 1] = {id, fields[3], string.format('%d', record.attempts), fence, record.list,
        record.first_claim_ms, string.format('%d', now_ms()), record.history:find('\n') == #record.history and 1 or 0,
        redis.call('EXISTS', cancel_key(id)), is_suspect(record, terms) and 1 or 0,
        tonumber(record.eta_ms or nil) or found.eta, record.retried_ms, found.is_unread and 1 or 0}
    end
  end
  return again
end

-- What follows the end of a job that was cancelled while its message waited.
local function follow_cancel(id, message, list, record)
  redis.call('HDEL', job_key(id), 'follow')
  redis.call('SREM', gone_key(queue_of(list)), id)
  -- Our client's jobs are in no chain or chord.
  if not record.sent then
    leave_follow_ups(id, message, 0)
  end
end

local function end_revoked(id, message, terms)
  end_record(id, terms.keep_s, terms.keep_s)
  end_stream(id, terms.cancel_event, terms.stream_s)
  leave_follow_ups(id, message, 0)
end

-- Settle the job of a message that was popped from `list`. Returns
--   'claimed', the claim
--   'buried', the job's id
--   'wait' if the job is a suspect and the caller `holds_suspect`; it must go back for now
--   'duplicate' if the message is a copy of a job that waits or runs; the message is dropped
--   'repeated', the job's id, if the job has ended; the message is dropped
local function take(job, message, list, terms, holds_suspect)
  local id, record = job.id, job.record
  if job.follow then
    follow_cancel(id, message, list, record)
    return 'duplicate'
  elseif record.state and record.state ~= 'queued' then
    redis.call('HINCRBY', job_key(id), 'duplicates', 1)
    return record.state == 'ended' and 'repeated' or 'duplicate', record.state == 'ended' and id
  end
  if is_revoked_elsewhere(id) then
    end_revoked(id, message, terms)
    return 'duplicate'
  end
  -- A suspect keeps the list it came from. A worker queue holds only until its job is claimed: if the job
  -- comes back, every worker of the model may take it.
  list = list == terms.suspects and record.list or list
  list = job.is_unread and list or shared_list(list)
  if is_exhausted(record, terms) then
    exhaust(id, message, list, record, terms)
    return 'buried', id
  end
  if holds_suspect and is_suspect(record, terms) then
    return 'wait'
  end
  return 'claimed', begin(job, message, list, terms)
end
