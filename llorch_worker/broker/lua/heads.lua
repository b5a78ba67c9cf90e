-- Which of KEYS, lists of jobs and the scheduled jobs, hold jobs, how many, and since when the next one waits.
--
-- Returns {now in s, {position in KEYS, jobs, time in s or ''}, ...}: when the job was enqueued, or
-- retried. For somebody's key of another type: {position, -1, its type}.
--
-- Parts: tenants, head

-- Hundreds of workers have thousands of lists, nearly all empty: one command rules out many.
local CHUNK = 50

local clock = redis.call('TIME')
local found = {string.format('%d.%06d', clock[1], clock[2])}
for first = 1, #KEYS, CHUNK do
  local last = math.min(first + CHUNK - 1, #KEYS)
  local filled = redis.call('EXISTS', unpack(KEYS, first, last))
  for i = first, filled > 0 and last or 0 do
    local is_scheduled = KEYS[i]:sub(-#SCHEDULED_SUFFIX) == SCHEDULED_SUFFIX
    local jobs = redis.pcall(is_scheduled and 'ZCARD' or 'LLEN', KEYS[i])
    if type(jobs) ~= 'number' then
      found[#found + 1] = {i, -1, redis.pcall('TYPE', KEYS[i]).ok or 'value'}
    elseif is_scheduled then
      found[#found + 1] = {i, jobs, ''}
    elseif jobs > 0 then
      local time, id = read_head(KEYS[i], -1)
      local retried_ms = id and redis.pcall('HGET', job_key(id), 'retried_ms')
      if type(retried_ms) == 'string' then
        time = string.format('%.3f', tonumber(retried_ms) / 1000)
      end
      found[#found + 1] = {i, jobs + waiting_behind(KEYS[i]), time or ''}
    end
  end
end
return found
