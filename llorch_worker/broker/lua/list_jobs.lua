-- Jobs that run or wait, as somebody sees them who looks at a page of them: no message and no text.
--
-- KEYS: the inbox lists of the models.
-- ARGV: what is asked for as JSON: see listed_jobs.py. `ids`: these jobs alone.
--
-- Returns JSON: `now_ms`; `running`, `waiting` and `scheduled`, how many there are; `looked`, at how many; and
-- `jobs`, the matching ones, those that have run longest first, then those that are claimed next.
--
-- Parts: names, score

local asked = cjson.decode(ARGV[1])
local looked = 0

local function matches(job)
  return (not asked.owner or job.owner == asked.owner)
    and (not asked.model or job.model == asked.model)
    and (not asked.worker or job.worker == asked.worker)
    and (not asked.tenant or job.tenant == asked.tenant or job.owner == asked.tenant)
end

-- A job's record, as far as it says anything; nil if the key is none.
local function read(id)
  looked = looked + 1
  local fields = redis.pcall('HMGET', job_key(id), 'state', 'worker', 'attempts', 'sent', 'tenant', 'owner', 'list',
    'first_claim_ms', 'eta_ms', 'came_ms')
  if fields.err or not fields[1] then
    return nil
  end
  local came_ms = tonumber(fields[10] or nil)
  return {
    id = id, state = fields[1], worker = fields[2] or '', attempts = tonumber(fields[3] or 0),
    sent = tonumber(fields[4] or nil) or came_ms and came_ms / 1000, tenant = fields[5] or '', owner = fields[6] or '',
    list = fields[7] or '', model = fields[7] and model_of(fields[7]) or '', begun_ms = tonumber(fields[8] or nil),
    eta_ms = tonumber(fields[9] or nil),
  }
end

-- How many tokens the last journalled event of a job makes. Somebody may have written a stream of his own.
local function tokens_of(id)
  local entries = redis.pcall('XREVRANGE', events_key(id), '+', '-', 'COUNT', 1)
  local is_json, event = pcall(cjson.decode, not entries.err and entries[1] and entries[1][2][2] or '')
  local has_tokens = is_json and type(event) == 'table' and type(event.ids) == 'table' and type(event.index) == 'number'
  return has_tokens and event.index + #event.ids or 0
end

local jobs = {}
local function add(id, state, limit)
  local job = #jobs < limit and looked < asked.most and read(id)
  if job and (not state or job.state == state) and job.state ~= 'ended' and matches(job) then
    jobs[#jobs + 1] = job
  end
end

local running = redis.call('ZCARD', LEASES)
if asked.ids then
  for _, id in ipairs(asked.ids) do
    add(id, nil, asked.limit)
  end
elseif asked.running then
  -- All, because those that have run longest come first.
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, asked.most - 1)) do
    add(id, 'claimed', asked.most)
  end
  table.sort(jobs, function(a, b) return (a.begun_ms or 0) < (b.begun_ms or 0) end)
  while #jobs > asked.limit do
    jobs[#jobs] = nil
  end
end
for _, job in ipairs(jobs) do
  job.tokens = job.state == 'claimed' and tokens_of(job.id) or nil
end

-- Those that wait: of all models the high ones, then the normal ones and the low ones.
local waiting, scheduled = 0, 0
for _, inbox in ipairs(#KEYS > 0 and redis.call('EXISTS', unpack(KEYS)) > 0 and KEYS or {}) do
  local length = redis.pcall('LLEN', inbox)
  waiting = waiting + (type(length) == 'number' and length or 0)
end
for _, model in ipairs(asked.models) do
  waiting = waiting + redis.call('ZCARD', waiting_key(model))
  scheduled = scheduled + redis.call('ZCARD', scheduled_key(model))
end
if asked.waiting and not asked.ids then
  for _, class in ipairs({HIGH, NORMAL, LOW}) do
    local first, last = bounds_of(class)
    for _, model in ipairs(asked.models) do
      local found = redis.call('ZRANGEBYSCORE', waiting_key(model), first, last, 'LIMIT', 0, asked.most)
      for _, id in ipairs(found) do
        add(id, 'waiting', asked.limit)
      end
    end
  end
  for _, model in ipairs(asked.models) do
    for _, id in ipairs(redis.call('ZRANGE', scheduled_key(model), 0, asked.most - 1)) do
      add(id, 'scheduled', asked.limit)
    end
  end
end
-- An empty table is an object to cjson.
return cjson.encode({now_ms = now_ms(), running = running, waiting = waiting, scheduled = scheduled,
  looked = looked, jobs = #jobs > 0 and jobs or nil})
