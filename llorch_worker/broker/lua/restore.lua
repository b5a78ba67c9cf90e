-- Let a job wait that its worker still runs, because Redis lost its data and knows nothing of it. This attempt does
-- not count.
--
-- Returns 1 if it did, 0 if the job is known.
--
-- Parts: names, message, score, waiting
-- Writes at maxmemory.

local job_id, fence, attempts, first_claim_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local list, message = ARGV[5], ARGV[6]

if redis.call('EXISTS', job_key(job_id), result_key(job_id)) > 0 then
  return 0
end
redis.call('HSET', job_key(job_id), 'list', list, 'fence', fence, 'attempts', attempts,
  'first_claim_ms', first_claim_ms, 'came_ms', first_claim_ms)
local said = read_message(message) or {}
if type(said[OWNER_HEADER]) == 'string' then
  redis.call('HSET', job_key(job_id), 'owner', said[OWNER_HEADER])
end
if reads_texts(said) then
  redis.call('HSET', job_key(job_id), 'reads', 1)
end
redis.call('SET', message_key(job_id), message)
let_wait(job_id, list)
return 1
