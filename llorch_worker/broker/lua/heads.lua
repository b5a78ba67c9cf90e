-- How many jobs wait in each list of KEYS, and since when the next one has.
--
-- Returns {now in s, {jobs, enqueue time in s or ''}, ...}.

local enqueued_at = ARGV[1] -- the header, which our client writes first; stock producers do not

local clock = redis.call('TIME')
local found = {string.format('%d.%06d', clock[1], clock[2])}
for i, list in ipairs(KEYS) do
  local message = redis.call('LINDEX', list, -1) or ''
  local time = string.match(string.sub(message, 1, 100), '"' .. enqueued_at .. '":%s*([%d.]+)')
  found[i + 1] = {redis.call('LLEN', list), time or ''}
end
return found
