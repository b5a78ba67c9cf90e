-- Ring for jobs that wait, or are due, and may have no ring.
--
-- KEYS: lists of jobs, and perhaps the model's scheduled jobs.
--
-- Returns when the next scheduled job is due, in ms from now, or -1.

local again_ms = -1
local rung = {}
allow_writes()
for _, key in ipairs(KEYS) do
  local waits
  if key:sub(-#SCHEDULED_SUFFIX) == SCHEDULED_SUFFIX then
    local next_due = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if next_due then
      again_ms = math.max(0, next_due - now_ms())
      waits = again_ms == 0
    end
  else
    waits = redis.call('EXISTS', key) == 1
  end
  local bell = waits and bell_of(key)
  if bell and not rung[bell] then
    rung[bell] = true
    ring(bell)
  end
end
return again_ms
