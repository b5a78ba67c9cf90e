-- Settling a popped message: as a claim, a dead letter, or nothing.
--
-- `terms` are the arguments of claim.lua by name.

-- Fills in a template for one job.
local function document_of(template, job_id)
  local id_json = cjson.encode(job_id):sub(2, -2):gsub('%%', '%%%%')
  return (template:gsub('@ID@', id_json))
end

-- End a job whose attempts are used up.
local function exhaust(letter, terms)
  local id = letter.id
  bury(letter, terms.most_letters)
  redis.call('HSET', job_key(id), 'state', 'ended')
  redis.call('EXPIRE', job_key(id), terms.keep_s)
  store_state(id, document_of(terms.failure, id), terms.keep_s)
  end_stream(id, terms.end_event, terms.stream_s)
end

-- Claim a job. Returns its values in the order that claim.lua returns.
local function begin(id, message, list, record, terms)
  local job, now = job_key(id), now_us()
  local claimed_ms = math.floor(now / 1000)
  local attempts = record.attempts + 1
  -- Taken from the clock rather than counted from 1: a claim that a failover lost must not have the
  -- same fence as the next one.
  local fence = string.format('%.0f', math.max(record.fence + 1, now))
  redis.call('HSET', job, 'state', 'claimed', 'fence', fence, 'message', message, 'list', list,
    'attempts', attempts, 'worker', terms.worker, 'progress', 0, 'company', 0,
    'history', record.history .. terms.worker .. ' ' .. claimed_ms .. '\n')
  redis.call('HSETNX', job, 'first_claim_ms', claimed_ms)
  redis.call('PERSIST', job)
  redis.call('ZADD', LEASES, claimed_ms + terms.lease_ms, id)
  return {id, message, attempts, fence, list, redis.call('HGET', job, 'first_claim_ms'), claimed_ms,
    record.state and 0 or 1, redis.call('EXISTS', cancel_key(id))}
end

-- Settle a message that was popped from `list`. Returns
--   'claimed', the claim
--   'buried', the job's id ('' if it names none)
--   'wait' if the job must go back for now: it lost a worker, and no redelivery is allowed
--   'duplicate' if the message is a copy of a job that runs or has ended; the copy is dropped
local function take(message, list, terms, redelivery_allowed)
  local id, has_eta = read_message(message)
  local record = id and redis.pcall('HMGET', job_key(id), 'state', 'attempts', 'history', 'list', 'fence')
  if not id or record.err then
    -- The error: the id is such that the record's key is another of our keys.
    bury({id = '', reason = 'malformed', message = readable(message), list = list, attempts = 0,
      history = ''}, terms.most_letters)
    return 'buried', ''
  end
  record = {state = record[1], attempts = tonumber(record[2] or '0'), history = record[3] or '',
    list = record[4], fence = tonumber(record[5] or '0')}
  if record.state == 'claimed' or record.state == 'ended' then
    redis.call('HINCRBY', job_key(id), 'duplicates', 1)
    return 'duplicate'
  end
  -- A suspect keeps the list it came from. A worker queue holds only until this claim: if the job
  -- comes back, every worker of the model may take it.
  list = shared_list(list == terms.suspects and record.list or list)
  if record.attempts >= terms.max_attempts then
    exhaust({id = id, reason = 'attempts exhausted', message = readable(message), list = list,
      attempts = record.attempts, history = record.history}, terms)
    return 'buried', id
  end
  if record.attempts > 0 and not redelivery_allowed then
    return 'wait'
  end
  local claim = begin(id, message, list, record, terms)
  if not has_eta then
    -- A worker claims only what it has room for, so a job starts with its claim. A job with an ETA
    -- is only held until then.
    store_state(id, document_of(terms.started, id), terms.keep_s)
  end
  return 'claimed', claim
end
