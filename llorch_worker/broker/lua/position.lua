-- How many jobs are before a waiting job. The rule of age and weights of tenants that send later change it.
--
-- Returns that number and the job's model, or nothing if it does not wait.
--
-- Parts: names

local list = redis.call('HGET', job_key(ARGV[1]), 'list')
local rank = list and redis.call('ZRANK', waiting_key(model_of(list)), ARGV[1])
return rank and {rank, model_of(list)}
