-- Jobs that run or wait, as somebody sees them who looks at a page of them: no message and no text.
--
-- KEYS: the lists in which jobs wait, with the sets of those that wait for their ETA, the most urgent first.
-- ARGV: what is asked for as JSON: see listed_jobs.py. `ids`: these jobs alone.
--
-- Returns JSON: `now_ms`; `running`, `waiting` and `scheduled`, how many there are; `looked`, at how many; and
-- `jobs`, the matching ones, those that have run longest first, then those whose turns come first.
--
-- Parts: lists, tenants, head

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
    'line', 'first_claim_ms', 'eta_ms')
  if fields.err then
    return nil
  end
  local list = fields[7] or fields[8] or ''
  return {
    id = id, state = fields[1] or 'queued', worker = fields[2] or '', attempts = tonumber(fields[3] or 0),
    sent = tonumber(fields[4] or nil), tenant = fields[5] or '', owner = fields[6] or '', list = list,
    model = list ~= '' and queue_of(list) or '', begun_ms = tonumber(fields[9] or nil),
    eta_ms = tonumber(fields[10] or nil), known = (fields[1] or fields[4]) and true or false,
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

local running = redis.call('ZCARD', LEASES)
if asked.running and not asked.ids then
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, asked.most - 1)) do
    local job = read(id)
    if job and job.state == 'claimed' and matches(job) then
      jobs[#jobs + 1] = job
    end
  end
  table.sort(jobs, function(a, b) return (a.begun_ms or 0) < (b.begun_ms or 0) end)
end
for _, id in ipairs(asked.ids or {}) do
  local job = read(id)
  if job and job.known and job.state ~= 'ended' and matches(job) then
    jobs[#jobs + 1] = job
  end
end
while #jobs > asked.limit do
  jobs[#jobs] = nil
end
for _, job in ipairs(jobs) do
  job.tokens = job.state == 'claimed' and tokens_of(job.id) or nil
end

-- Those that wait. Lists of one priority take turns, so the first of each come before the second of any.
local found, waiting, scheduled = {}, 0, 0
-- A job that matches a filter may be behind many that do not.
local most_each = (asked.owner or asked.tenant or asked.worker) and asked.most or asked.limit
local function look_into(list, rank, tenant)
  local jobs_there = length_alone(list)
  for i = 0, math.min(jobs_there, most_each, math.max(0, asked.most - looked)) - 1 do
    local sent, id = read_head(list, -1 - i)
    local job = id and read(id)
    if job then
      job.sent = job.sent or tonumber(sent or nil)
      job.list = job.list ~= '' and job.list or list
      job.model = job.model ~= '' and job.model or queue_of(list)
      job.tenant = job.tenant ~= '' and job.tenant or tenant or ''
      job.rank, job.turn = rank, i
      -- A message of a job that has ended, or runs, is a copy, or has been cancelled.
      if job.state == 'queued' and matches(job) then
        found[#found + 1] = job
      end
    end
  end
end
local CHUNK = 50
for first = 1, #KEYS, CHUNK do
  local last = math.min(first + CHUNK - 1, #KEYS)
  local filled = redis.call('EXISTS', unpack(KEYS, first, last))
  for i = first, filled > 0 and last or 0 do
    local list = KEYS[i]
    if list:sub(-#SCHEDULED_SUFFIX) == SCHEDULED_SUFFIX then
      local later = redis.pcall('ZCARD', list)
      scheduled = scheduled + (type(later) == 'number' and later or 0)
      if asked.waiting and type(later) == 'number' and not asked.ids then
        for place, id in ipairs(redis.call('ZRANGE', list, 0, most_each - 1)) do
          local job = read(id)
          if job and matches(job) then
            job.rank, job.turn = #KEYS + i, place
            found[#found + 1] = job
          end
        end
      end
    else
      waiting = waiting + length(list)
      if asked.waiting and not asked.ids then
        local rank = asked.ranks[i]
        look_into(list, rank)
        if is_tenants_list(list) then
          for _, tenant in ipairs(redis.call('HKEYS', tenants_key(list))) do
            if not tenant:find('^[*/]') then
              look_into(own_list(list, tenant), rank, tenant)
            end
          end
        end
      end
    end
  end
end
table.sort(found, function(a, b)
  if a.rank ~= b.rank then return a.rank < b.rank end
  if a.turn ~= b.turn then return a.turn < b.turn end
  return (a.sent or 0) < (b.sent or 0)
end)
for _, job in ipairs(found) do
  if #jobs < asked.limit then
    jobs[#jobs + 1] = job
  end
end
-- An empty table is an object to cjson.
return cjson.encode({now_ms = now_ms(), running = running, waiting = waiting, scheduled = scheduled,
  looked = looked, jobs = #jobs > 0 and jobs or nil})
