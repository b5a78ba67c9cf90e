-- Take ended jobs after whose end Celery has more to do: see follow_ups.py.
--
-- Returns {id, message, result} for each; it is the caller's for `lease_ms`.

local lease_ms, most_jobs = ARGV[1], ARGV[2]

local taken = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', FOLLOW_UPS, '-inf', now_ms(), 'LIMIT', 0,
    most_jobs)) do
  redis.call('ZADD', FOLLOW_UPS, now_ms() + lease_ms, id)
  taken[#taken + 1] = {id, redis.call('HGET', job_key(id), 'message') or '',
    redis.call('GET', result_key(id)) or ''}
end
return taken
