-- Which lists of KEYS hold jobs, how many, and since when the next one waits.
--
-- Returns {now in s, {position in KEYS, jobs, enqueue time in s or ''}, ...}.

local enqueued_at = ARGV[1] -- the header, which our client writes first; stock producers do not

-- Hundreds of workers have thousands of lists, nearly all empty: one command rules out many.
local CHUNK = 50

local clock = redis.call('TIME')
local found = {string.format('%d.%06d', clock[1], clock[2])}
for first = 1, #KEYS, CHUNK do
  local last = math.min(first + CHUNK - 1, #KEYS)
  local filled = redis.call('EXISTS', unpack(KEYS, first, last))
  for i = first, filled > 0 and last or 0 do
    local jobs = redis.call('LLEN', KEYS[i])
    if jobs > 0 then
      local message = string.sub(redis.call('LINDEX', KEYS[i], -1), 1, 100)
      local time = string.match(message, '"' .. enqueued_at .. '":%s*([%d.]+)')
      found[#found + 1] = {i, jobs, time or ''}
    end
  end
end
return found
