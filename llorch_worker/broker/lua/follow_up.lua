-- Take ended jobs after whose end Celery has more to do: see follow_ups.py.
--
-- Returns {id, message, result, fence} for each; it is the caller's for `lease_ms`.

local lease_ms, most_jobs = ARGV[1], ARGV[2]

shorten(FOLLOW_UPS, lease_ms, most_jobs)
local taken = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', FOLLOW_UPS, '-inf', now_ms(), 'LIMIT', 0,
    most_jobs)) do
  redis.call('ZADD', FOLLOW_UPS, now_ms() + lease_ms, id)
  local message, fence = unpack(redis.call('HMGET', job_key(id), 'message', 'fence'))
  taken[#taken + 1] = {id, message or '', redis.call('GET', result_key(id)) or '', fence or ''}
end
return taken
