-- Nothing more is to be done after a job's end.

local job_id, keep_s = ARGV[1], ARGV[2]
if redis.call('ZREM', FOLLOW_UPS, job_id) == 1 then
  redis.call('HDEL', job_key(job_id), 'message')
  redis.call('EXPIRE', job_key(job_id), keep_s)
end
