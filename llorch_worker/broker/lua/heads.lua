-- How many jobs wait in each list of KEYS, and since when the next one has.
--
-- Returns {now in s, {jobs, enqueue time in s or ''}, ...}.

local enqueued_at = ARGV[1] -- the header, which our client writes first; stock producers do not

local clock = redis.call('TIME')
local found = {string.format('%d.%06d', clock[1], clock[2])}
for i, list in ipairs(KEYS) do
  local jobs = redis.call('LLEN', list)
  local time
  if jobs > 0 then -- most lists are empty: a worker has twenty
    local message = redis.call('LINDEX', list, -1)
    time = string.match(string.sub(message, 1, 100), '"' .. enqueued_at .. '":%s*([%d.]+)')
  end
  found[i + 1] = {jobs, time or ''}
end
return found
