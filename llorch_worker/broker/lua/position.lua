-- How many jobs are before a waiting job: those of more urgent lists, those before it in its own, and for
-- each other tenant as many as get their turns before. Jobs that were cancelled count until they are
-- claimed; weights of tenants and turns of less urgent lists do not.
--
-- Returns that number and the model's queue, or nothing if it is not known: the job does not wait in a
-- list, another producer sent it, or it was retried.
--
-- Parts: lists, tenants, head

local job_id = ARGV[1]
local MOST_WITHOUT_TIME = 64 -- messages in a row, of stock producers

local state, sent, line, tenant = unpack(redis.call('HMGET', job_key(job_id), 'state', 'sent', 'line', 'tenant'))
if not line or state and state ~= 'queued' then
  return nil
end
sent = tonumber(sent)

-- The job's place from the head, which is 0. Jobs are in the order of their times.
local function place_in(list)
  local low, high = 0, redis.call('LLEN', list) - 1
  while low <= high do
    local middle = math.floor((low + high) / 2)
    local probe = middle
    local time, id = read_head(list, -1 - probe)
    while not time and probe < high and probe < middle + MOST_WITHOUT_TIME do
      probe = probe + 1
      time, id = read_head(list, -1 - probe)
    end
    if id == job_id then
      return probe
    elseif time and tonumber(time) < sent then
      low = probe + 1
    else
      high = middle - 1
    end
  end
end

local base = line:gsub(TENANTS_MARK .. '$', '')
local plain = tenant ~= '' and base:gsub(STEP_SEPARATOR .. '$', '') or line
local turns = tenants_list(plain)

-- The job's place among those of its tenant; jobs without a tenant are one more tenant's.
local before
if tenant == '' then
  before = place_in(plain)
else
  for i = 0, length_alone(turns) - 1 do
    local _, id = read_head(turns, i)
    if id == job_id then
      before = 0
      break
    end
  end
  local behind = not before and place_in(own_list(turns, tenant))
  before = before or behind and behind + 1
end
if not before then
  return nil
end
local ahead = before
local waiting = redis.call('HGETALL', tenants_key(turns))
for i = 1, #waiting, 2 do
  if waiting[i] ~= tenant and not waiting[i]:find('^[*/]') then
    ahead = ahead + math.min(tonumber(waiting[i + 1]), before + 1)
  end
end
if tenant ~= '' then
  ahead = ahead + math.min(length(plain), before + 1)
end

local queue = plain:gsub(HIGH_SUFFIX .. '$', ''):gsub(LOW_SUFFIX .. '$', '')
for _, list in ipairs({queue .. HIGH_SUFFIX, queue, queue .. LOW_SUFFIX}) do
  if list == plain then
    return {ahead, queue_of(plain)}
  end
  ahead = ahead + length(list) + length(tenants_list(list))
end
