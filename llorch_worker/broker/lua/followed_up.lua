-- Nothing more is to be done after a job's end.

local job_id, keep_s = ARGV[1], ARGV[2]
local fence = ARGV[3] -- of the job at that end; it may have been retried and have ended again
if (redis.call('HGET', job_key(job_id), 'fence') or '') == fence
    and redis.call('ZREM', FOLLOW_UPS, job_id) == 1 then
  redis.call('DEL', message_key(job_id))
  redis.call('EXPIRE', job_key(job_id), keep_s)
end
