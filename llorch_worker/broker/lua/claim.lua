-- Take jobs that wait: count the attempt of each and register its lease, in one step.
--
-- From the most urgent class on, and in the order of their scores: see parts/score.lua. Before that one job of a lower
-- class, if the class has waited long: the rule of age. The caller leaves other workers their share of many jobs. It
-- skips jobs that need what it has not, and suspects while it holds one. A suspect may have killed its engine: see
-- release.lua. It runs beside no other suspect until it has made progress.
--
-- The caller looks at everything, so wake-ups for its queues are spent. If it leaves jobs that another may take, it
-- wakes the next worker: see wake_ups.py. An `urgent` caller has no room, and preempts for what it takes. It claims high
-- jobs only. A call that was sent before, because its reply was lost, gives the same jobs and takes no others. A caller
-- of a `kind` claims jobs that generate, or those that read texts; the others wait for another one.
--
-- KEYS: the inbox lists of the queues that the caller consumes.
-- ARGV: the caller's terms as JSON: see claims.py.
--
-- Returns when to look again, in ms from now, or -1; the number of claims; the values of each, see `begin`; then
-- of each dead letter, and of each message whose job had ended, its id, and 'buried' or 'repeated'. All in one
-- array: Redis would send each that lies in another in a packet of its own.
--
-- Parts: names, wake_ups, message, letters, score, waiting, inbox, affinity, take
-- Writes at maxmemory.

-- How long suspects wait for one that runs: the longer it has run, the longer, because then so does a prefill.
local LEAST_WAIT_MS, MOST_WAIT_MS = 10, 200
-- Of messages: the leases of all jobs begin before the caller has read the first message.
local MOST_CLAIMED_BYTES = 4 * 2 ^ 20
-- How many records a search reads: the first of a class, and as many from where the last such search stopped.
local MOST_LOOKED = 250
local SEARCH_MS = 2000 -- how long it is known where that was
local MOST_MOVED = 64

local terms = cjson.decode(ARGV[1])
local model, limit, kind = terms.model, terms.limit, terms.kind
local reads = kind == 'texts'
local waiting = waiting_key(model)
local claims, dropped = {}, {}
local bytes, unfit, suspects_wait, goes_on = 0, 0, false, false

local function reply(again_ms)
  local values = {again_ms, #claims}
  for _, parts in ipairs({claims, dropped}) do
    for _, part in ipairs(parts) do
      for i = 1, #part do
        values[#values + 1] = part[i]
      end
    end
  end
  return values
end

if terms.sent_before then
  claims = begun_by(terms)
  if #claims > 0 or limit == 0 then
    return reply(0)
  end
end

local suspect_since_us = false -- when the caller claimed the suspect that it holds
for _, id in ipairs(terms.suspects_held) do
  local record = read_record(id)
  -- A fence is a time.
  suspect_since_us = suspect_since_us or is_suspect(record, terms) and record.fence
end

local function may_claim(class)
  return terms.classes[tostring(class)] and (class == HIGH or not terms.urgent)
end

-- Claim a job, if it can be. Returns what came of it: see settle_waiting.
local function settle(record, score)
  local outcome, claim = settle_waiting(record, score, terms, suspect_since_us)
  if outcome == 'claimed' then
    claims[#claims + 1] = claim
    bytes = bytes + (claim[2] and #claim[2] or redis.call('STRLEN', message_key(record.id)))
    suspect_since_us = suspect_since_us or claim[10] == 1 and now_us()
  elseif outcome == 'buried' then
    dropped[#dropped + 1] = {record.id, outcome}
  elseif outcome == 'suspect' then
    suspects_wait = true
  elseif outcome == 'unfit' then
    unfit = unfit + 1
  end
  return outcome
end

-- The first jobs that wait, with their scores; if they are all, nothing else needs to be asked.
local function first_jobs()
  local found = redis.call('ZRANGE', waiting, 0, WINDOW - 1, 'WITHSCORES')
  return found, #found < 2 * WINDOW
end
local first, is_all = first_jobs()

-- A job that comes while none waits need not wait itself.
local starts = #first == 0 and limit > 0 and not terms.urgent
local function receive(job)
  if not starts or kind ~= 'any' and reads ~= job.reads then
    return let_come(job)
  end
  starts, job.state = false, 'waiting'
  local score = score_of(job, true)
  redis.call('SET', message_key(job.id), job.message)
  local outcome = settle(job, tonumber(score))
  if outcome == 'suspect' or outcome == 'unfit' then
    let_come(job, score)
  end
end

local moved, is_more, repeated = 0, false, {}
if #KEYS > 0 then
  moved, is_more, repeated = empty_inbox(KEYS, MOST_MOVED, receive, function()
    return redis.call('EXISTS', watch_key(model)) == 1 -- the watcher takes large ones
  end)
  if moved > #claims + #repeated then
    first, is_all = first_jobs()
  end
end
for _, id in ipairs(repeated) do
  dropped[#dropped + 1] = {id, 'repeated'}
end

local classes, jobs = {}, 0
if #first > 0 then
  classes, jobs = classes_that_wait(model, is_all and first, kind)
end

-- The class behind others whose first job has waited longest, if that is as long as the rule of age says. In so much
-- time one job of a class goes first, not each that is old. It is the next by fair shares, which need not be the oldest:
-- of an older one's tenant more went before.
local function class_of_age()
  local oldest, oldest_ms
  for i = 2, #classes do
    local least, last = bounds_of(classes[i], kind)
    local id = redis.call('ZRANGEBYSCORE', waiting, least, last, 'LIMIT', 0, 1)[1]
    local aged_ms = tonumber(redis.call('HGET', aged_key(model), share_of(classes[i], reads)) or 0)
    -- A later time is from before the clock was set back.
    local since_ms = math.max(read_record(id).since_ms, aged_ms <= now_ms() and aged_ms or 0)
    if now_ms() - since_ms >= terms.low_waits_ms and (not oldest or since_ms < oldest_ms) then
      oldest, oldest_ms = classes[i], since_ms
    end
  end
  return oldest
end

-- The jobs of a class from a score, or its first, and a place on, with their scores.
local function page_of(class, from, offset, count)
  if is_all then
    return offset == 0 and of_class(first, class, kind) or {}
  end
  local least, last = bounds_of(class, kind)
  return redis.call('ZRANGEBYSCORE', waiting, from or least, last, 'WITHSCORES', 'LIMIT', offset, count)
end

-- Jobs that wait no more, and whether a job was tried: what the caller cannot take now is counted once.
local settled, is_tried = {}, {}

-- Take up to `most` jobs of a class; returns how many.
local function take_from(class, most)
  local before, tops = #claims, {} -- of each kind, where its last one started

  local function has_enough()
    return #claims - before >= most or bytes >= MOST_CLAIMED_BYTES
  end

  local function try(job)
    local outcome = settle(job.record or read_record(job.id), job.score)
    is_tried[job.id] = true
    if outcome ~= 'suspect' and outcome ~= 'unfit' then
      settled[#settled + 1] = job.id
    end
    if outcome == 'claimed' then
      local of_kind = kind_of(job.score >= first_score(class, true))
      tops[of_kind] = math.max(tops[of_kind] or 0, job.score)
    end
  end

  -- Try so many jobs as one search reads, from a score or the class's first on. Returns the score at which it
  -- stopped, if others are behind and the caller has not enough.
  local function search(from)
    local count, stopped = math.max(WINDOW, most), nil
    for offset = 0, MOST_LOOKED - 1, count do
      local page, jobs = page_of(class, from, offset, count), {}
      for i = 1, #page, 2 do
        jobs[#jobs + 1] = not is_tried[page[i]] and {id = page[i], score = tonumber(page[i + 1])} or nil
      end
      if not from and offset == 0 and terms.place ~= '' and #jobs > 1 then
        jobs = own_first(jobs, terms.place)
      end
      for _, job in ipairs(jobs) do
        if has_enough() then
          return nil
        end
        try(job)
      end
      if #page < 2 * count or has_enough() then
        return nil
      end
      stopped = page[#page]
    end
    return stopped
  end

  local stopped = search()
  if stopped then
    -- The caller cannot take the first ones. It goes on where callers like it stopped last, and the next call from there.
    local alike = {class, kind, terms.max_context, suspect_since_us and 1 or 0, terms.fingerprint}
    local note = searched_key(model .. ' ' .. table.concat(alike, ' '))
    local noted = redis.call('GET', note)
    stopped = search(noted and tonumber(noted) > tonumber(stopped) and noted or stopped)
    if stopped then
      goes_on = true
      redis.call('SET', note, stopped, 'PX', SEARCH_MS)
    end
  end
  for _, top in pairs(tops) do
    note_start(model, class, top)
  end
  return #claims - before
end

local due = class_of_age()
-- Wake-ups.
local wake_keys, most = {full_wake_key(model, kind)}, limit
if terms.urgent then
  -- Either a worker with room has taken the wake-up, or one must claim an aged job first.
  if due or redis.call('EXISTS', wake_key_of_class(model, HIGH, kind)) == 0 then
    most, due = 0, nil
  else
    wake_keys[2] = wake_key_of_class(model, HIGH, kind)
  end
else
  if may_claim(HIGH) then wake_keys[#wake_keys + 1] = wake_key_of_class(model, HIGH, kind) end
  if may_claim(NORMAL) then wake_keys[#wake_keys + 1] = wake_key_of_class(model, NORMAL, kind) end
  if terms.place ~= '' then wake_keys[#wake_keys + 1] = wake_key(terms.place) end
end
redis.call('DEL', unpack(wake_keys))

local all = jobs + #claims
local living = all > 1 and redis.call('ZCOUNT', live_key(model), now_ms() - terms.gone_ms, '+inf') or 1
local share = math.min(most, math.ceil(all / math.max(1, living)))
if due and may_claim(due) and share > #claims and take_from(due, 1) > 0 then
  redis.call('HSET', aged_key(model), share_of(due, reads), now_ms())
end
for _, class in ipairs(classes) do
  if may_claim(class) and #claims < share then
    take_from(class, share - #claims)
  end
end
if #settled > 0 then
  redis.call('ZREM', waiting, unpack(settled))
end

-- Wake a worker for what is left. Not for suspects, nor for jobs that need what the caller has not: workers that
-- cannot take them would wake each other for ever. The watcher does it for them.
local left = jobs - #settled - unfit
if left > 0 and not suspects_wait and (#claims > 0 or moved > 0) then
  for _, class in ipairs((classes_that_wait(model, nil, kind))) do
    wake_class(model, class, reads)
  end
end
if moved > 0 and kind ~= 'any' then
  for _, class in ipairs((classes_that_wait(model, nil, kind_of(not reads)))) do
    wake_class(model, class, not reads)
  end
end
if terms.place ~= '' then
  note_load(terms.place, terms.jobs + #claims, #claims < limit)
end

local again_ms = -1
if suspects_wait then
  local ran_ms = (now_us() - (suspect_since_us or 0)) / 1000
  again_ms = math.floor(math.min(MOST_WAIT_MS, math.max(LEAST_WAIT_MS, ran_ms / 4)))
end
if #claims < share and goes_on or #claims < limit and (is_more or bytes >= MOST_CLAIMED_BYTES) then
  again_ms = 0
end
if #claims > 0 then
  local noted = {terms.call}
  for _, found in ipairs(claims) do
    noted[#noted + 1], noted[#noted + 2] = found[1], found[4]
  end
  redis.call('SET', terms.call_key, cjson.encode(noted), 'PX', math.max(1, terms.lease_ms))
end
return reply(again_ms)
