-- Settling a job that waits: as a claim, a dead letter, or nothing.
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

-- Whether the job has had all its attempts.
local function is_exhausted(record, terms)
  return record.deaths > 0
    and (record.deaths >= terms.max_deaths or (record.strikes or 0) >= terms.max_attempts)
end

-- Whether a living worker serves this fingerprint with such a context, as its card says.
local served = {}
local function is_served(fingerprint, context, terms)
  if served[fingerprint] == nil then
    served[fingerprint] = -1
    local said = '"fingerprint":' .. cjson.encode(fingerprint)
    for _, place in ipairs(redis.call('ZRANGEBYSCORE', live_key(terms.model), now_ms() - terms.gone_ms, '+inf')) do
      local card = redis.pcall('GET', worker_key(place))
      if type(card) == 'string' and card:find(said, 1, true) then
        served[fingerprint] = math.max(served[fingerprint], tonumber(card:match('"max_context":(%d+)')) or 0)
      end
    end
  end
  return served[fingerprint] >= context
end

-- The largest context of the workers that live, or may only be restarting.
local largest
local function largest_context(terms)
  if not largest then
    largest = 0
    local since_ms = now_ms() - terms.awaited_ms
    for _, context in ipairs(redis.call('ZRANGEBYSCORE', contexts_key(terms.model), since_ms, '+inf')) do
      largest = math.max(largest, tonumber(context) or 0)
    end
  end
  return largest
end

-- Whether the caller has what the job needs: room for all its tokens, unless nobody has it: then the caller's engine
-- refuses the job; and the model that began it, unless nobody with room serves that any more: then it begins again.
local function fits(record, terms)
  local needs, least = record.needs_fingerprint, record.least_context
  if least > terms.max_context and least <= largest_context(terms) then
    return false
  end
  return needs == '' or needs == terms.fingerprint or not is_served(needs, least, terms)
end

-- End a job whose attempts are used up.
local function exhaust(record, terms)
  local id = record.id
  local message = redis.call('GET', message_key(id))
  bury({id = id, message_bytes = #message, reason = 'attempts exhausted', message = message, list = record.list,
    attempts = record.attempts, history = record.history}, terms.letters_bytes, terms.most_letters)
  end_record(id, terms.keep_s, terms.keep_s, nil, 0)
  store_state(id, document_of(terms.failure, id), terms.keep_s)
  end_stream(id, terms.end_event, terms.stream_s)
end

-- What a claim returns of a job: its id, message or nil, attempts, fence, list, ms of its first claim and of this one, 1 if this is
-- the first, 1 if a cancel was requested, 1 if it is a suspect, its ETA (in ms if it has waited for it, else as the
-- message has it, or nil), ms of its retry, or nil, 1 if Python is to read the message, and 1 if it reads texts.
local function values_of(record, message, claimed_ms, is_first, cancelled, terms)
  return {record.id, message, record.attempts, record.fence, record.list, record.first_claim_ms, claimed_ms,
    is_first and 1 or 0, cancelled, is_suspect(record, terms) and 1 or 0, record.eta_ms or record.eta,
    record.retried_ms, record.unread and 1 or 0, record.reads and 1 or 0}
end

local begun = 0

-- Claim a job.
local function begin(record, message, score, terms)
  -- Of jobs that are claimed together, the later has the greater fence.
  local id, job, now = record.id, job_key(record.id), now_us() + begun
  begun = begun + 1
  local claimed_ms = math.floor(now / 1000)
  -- Taken from the clock rather than counted from 1: a claim that a failover lost, or an older state of
  -- Redis, must not have the same fence as the next one. Nor must it where the clock is behind.
  record.fence = string.format('%d', now > record.fence and now or record.fence + 1 + terms.fence_step)
  local claimed = string.format('%d', claimed_ms)
  local is_first = not record.first_claim_ms
  record.attempts = string.format('%d', record.attempts + 1)
  record.first_claim_ms = record.first_claim_ms or claimed
  redis.call('HSET', job, 'state', 'claimed', 'fence', record.fence, 'attempts', record.attempts, 'worker', terms.worker,
    'lease_ms', terms.lease_ms, 'progress', '0', 'score', whole(score), 'history', record.history .. terms.worker .. ' ' .. claimed .. '\n',
    'first_claim_ms', record.first_claim_ms, 'place', terms.place, unpack(record.fields or {}))
  if record.idempotency then
    redis.call('PERSIST', record.idempotency)
  end
  redis.call('ZADD', LEASES, string.format('%d', claimed_ms + terms.lease_ms), id)
  -- A cancel of a job that was never claimed ends it.
  local cancelled = is_first and 0 or redis.call('EXISTS', cancel_key(id))
  return values_of(record, message, claimed, is_first, cancelled, terms)
end

-- What this call claimed when it was sent before; nothing if it claimed nothing. Its reply was lost, so nobody has
-- seen the claims yet.
local function begun_by(terms)
  local noted = redis.pcall('GET', terms.call_key)
  local known = type(noted) == 'string' and cjson.decode(noted) or {}
  local again = {}
  for place = 2, known[1] == terms.call and #known or 0, 2 do
    local record = read_record(known[place])
    local message = message_of(record.id)
    -- Without its message somebody has deleted a part of it.
    if message ~= nil and is_claimed(record.id, known[place + 1]) then
      record.fence, record.attempts = known[place + 1], string.format('%d', record.attempts)
      redis.call('ZADD', LEASES, string.format('%d', now_ms() + terms.lease_ms), record.id)
      again[#again + 1] = values_of(record, message, string.format('%d', now_ms()),
        record.history:find('\n') == #record.history, redis.call('EXISTS', cancel_key(record.id)), terms)
    end
  end
  return again
end

-- Settle a job that waits. Returns
--   'claimed', the claim
--   'buried'
--   'gone', if it has ended in another way
--   'suspect', if it is one and the caller `holds_suspect`, or 'unfit', if the caller lacks what it needs: it waits on
local function settle_waiting(record, score, terms, holds_suspect)
  local id = record.id
  local message
  if record.message then
    message = brief(record.message)
  elseif record.state == 'waiting' then
    message = message_of(id)
  end
  if message == nil then
    -- Somebody has deleted a part of it.
    return 'gone'
  end
  local exhausted = is_exhausted(record, terms)
  local waits = not exhausted
    and (holds_suspect and is_suspect(record, terms) and 'suspect' or not fits(record, terms) and 'unfit')
  -- A worker claims only what it has room for, so a job starts with its claim, unless it is put back at once.
  local starts = not exhausted and not waits and (record.eta_ms or not record.eta and not record.unread)
  local is_revoked
  if starts then
    is_revoked = not store_unless_revoked(id, document_of(terms.started, id), terms.keep_s)
  else
    is_revoked = is_revoked_elsewhere(id)
  end
  if is_revoked then
    if record.fields then
      redis.call('HSET', job_key(id), unpack(record.fields))
    end
    end_record(id, terms.keep_s, terms.keep_s, nil, 0)
    end_stream(id, terms.cancel_event, terms.stream_s)
    return 'gone'
  elseif exhausted then
    exhaust(record, terms)
    return 'buried'
  elseif waits then
    return waits
  end
  return 'claimed', begin(record, message, score, terms)
end
