-- Ring for jobs that wait, or are due, and may have no ring.
--
-- KEYS: lists of jobs, and perhaps the model's scheduled jobs.
--
-- A scheduled job that is due goes to the head of its queue.
-- Jobs of a step between normal and low, and of lists with ':' between queue and priority, as Celery's
-- documentation advises, go to the tail of the list that workers look at.
--
-- Returns when the next scheduled job is due, the worker that was rung for one has had its time, or more
-- is to be moved, in ms from now, or -1.
--
-- Parts: lists, bells, scheduled, placing
-- Writes at maxmemory.

local for_fresh = ARGV[1] == '1' -- also for jobs whose ring the caller has just taken
local MOST_DUE = 100 -- of the scheduled jobs, so that one call stays short
local MOST_MOVED = 1000 -- likewise
local again_ms = -1
local rings = {} -- bells that ring

-- Whether to ring for what is due at this time; if it is later, the caller looks again then.
local function is_due(due_ms)
  local left_ms = math.ceil(due_ms - now_us() / 1000)
  if left_ms > 0 then
    again_ms = again_ms < 0 and left_ms or math.min(again_ms, left_ms)
  end
  return left_ms <= 0
end

-- Whether the list's jobs may have no ring. Our client may have rung for the first one just now.
local function may_need_ring(list)
  local message = redis.pcall('LINDEX', list, -1)
  if type(message) ~= 'string' then
    return false -- nothing, or somebody's key of another type
  end
  local time = read_place(message)
  local rung_ms = time and not for_fresh and 1000 * time
  return not rung_ms or rung_ms > now_ms() or is_due(rung_ms + FRESH_MS)
end

-- Move the jobs of a list that no worker claims from to that of their priority. Returns the list that
-- workers claim from.
local function move_to_priority_list(key)
  local queue, step = key:match('^(.*):(%d)$')
  if not queue then
    queue, step = key:match('^(.*)' .. STEP_SEPARATOR .. '(%d)$')
  end
  local is_low = queue and STEP_SEPARATOR .. step == LOW_SUFFIX and not is_high(queue)
  local list = queue and queue .. (is_low and LOW_SUFFIX or '') or key
  if list == key then
    return key
  end
  local moved = 0
  while moved < MOST_MOVED and type(redis.pcall('RPOPLPUSH', key, list)) == 'string' do
    moved = moved + 1
  end
  again_ms = moved == MOST_MOVED and 1 or again_ms
  return list
end

for _, key in ipairs(KEYS) do
  if key:sub(-#SCHEDULED_SUFFIX) == SCHEDULED_SUFFIX then
    for _, list in ipairs(release_due(key, MOST_DUE)) do
      rings[bell_of(list)] = true
    end
    local next_due = first_due(key)
    again_ms = next_due and is_due(next_due) and 1 or again_ms
  else
    key = move_to_priority_list(key)
    if may_need_ring(key) then
      rings[bell_of(key)] = true
    end
  end
end
for bell in pairs(rings) do
  ring(bell)
end
return again_ms
