-- Jobs that wait: their ids are in the sorted set of their model, the rest in their records and messages.

-- Since when a job waits, in ms, by these fields of its record: since it came, or since its ETA.
local function waits_since_ms(sent, came_ms, eta_ms)
  return math.max(tonumber(eta_ms or 0), tonumber(came_ms or nil) or 1000 * tonumber(sent or 0))
end

-- A job's record. `is_strange`: somebody's key of another type is in its place, so nothing in it is known.
local function read_record(id)
  local fields = redis.pcall('HMGET', job_key(id), 'state', 'list', 'attempts', 'history', 'fence', 'deaths', 'strikes',
    'progress', 'idempotency', 'first_claim_ms', 'retried_ms', 'eta_ms', 'eta', 'unread', 'sent', 'came_ms', 'prefers',
    'needs_fingerprint', 'least_context', 'reads')
  return {
    id = id, is_strange = fields.err, state = fields[1], list = fields[2], attempts = tonumber(fields[3] or 0),
    history = fields[4] or '', fence = tonumber(fields[5] or 0), deaths = tonumber(fields[6] or 0),
    strikes = tonumber(fields[7] or nil), progress = fields[8], idempotency = fields[9], first_claim_ms = fields[10],
    retried_ms = fields[11], eta_ms = tonumber(fields[12] or nil), eta = fields[13] and fields[13] ~= '' and fields[13],
    unread = fields[14] == '1', since_ms = waits_since_ms(fields[15], fields[16], fields[12]), prefers = fields[17],
    needs_fingerprint = fields[18] or '', least_context = tonumber(fields[19] or nil) or 0,
    reads = fields[20] == '1',
  }
end

-- Those of these jobs with scores that are of a class, and of this kind: see bounds_of.
local function of_class(jobs, class, kind)
  local found = {}
  for i = 1, #jobs, 2 do
    local score = tonumber(jobs[i + 1])
    local own = kind ~= 'texts' and kind ~= 'generation' or kind == kind_of(score >= first_score(class, true))
    if math.floor(score / CLASS) == class and own then
      found[#found + 1] = jobs[i]
      found[#found + 1] = jobs[i + 1]
    end
  end
  return found
end

-- The classes that have jobs, of this kind, the most urgent first, and how many these are. `jobs`: all that wait, with
-- their scores, if the caller has them.
local function classes_that_wait(model, jobs, kind)
  local found, count = {}, 0
  for _, class in ipairs({HIGH, NORMAL, LOW}) do
    local of_it = jobs and #of_class(jobs, class, kind) / 2
      or redis.call('ZCOUNT', waiting_key(model), bounds_of(class, kind))
    if of_it > 0 then
      found[#found + 1], count = class, count + of_it
    end
  end
  return found, count
end

-- Let a job wait for a worker: at this score, or at that which it had before.
local function let_wait(id, list, score)
  local model, job = model_of(list), job_key(id)
  local had, reads = unpack(redis.call('HMGET', job, 'score', 'reads'))
  score = score or had or whole(virtual_time(shares_key(model), class_of(list), reads == '1'))
  redis.call('HSET', job, 'state', 'waiting')
  redis.call('ZADD', waiting_key(model), score, id)
end

-- When the first scheduled job of a model is due, in ms; nil if there is none.
local function first_due(model)
  return tonumber(redis.call('ZRANGE', scheduled_key(model), 0, 0, 'WITHSCORES')[2])
end

-- Let up to `limit` jobs wait whose ETA has come. Returns how many.
--
-- Each goes to the tail, because its place from before cost its tenant nothing: see release.lua. Jobs that are due
-- together keep their order.
local function release_due(model, limit)
  local scheduled, due = scheduled_key(model), {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', scheduled, '-inf', now_ms(), 'LIMIT', 0, limit)) do
    local fields = redis.pcall('HMGET', job_key(id), 'state', 'list', 'tenant', 'reads', 'score')
    if fields[1] == 'scheduled' and fields[2] then
      due[#due + 1] = {id = id, list = fields[2], tenant = fields[3] or '', reads = fields[4] == '1',
        score = tonumber(fields[5] or nil) or 0}
    else
      redis.call('ZREM', scheduled, id)
    end
  end
  table.sort(due, function(a, b) return a.score < b.score end)
  for _, job in ipairs(due) do
    local message_bytes = tonumber(redis.pcall('STRLEN', message_key(job.id))) or 0 -- an error: see read_record
    local score, cost = score_at_tail(job.list, job.tenant, tokens_of(message_bytes), job.reads)
    redis.call('HSET', job_key(job.id), 'cost', cost)
    let_wait(job.id, job.list, score)
    redis.call('ZREM', scheduled, job.id)
  end
  return #due
end
