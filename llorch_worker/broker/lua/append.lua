-- Journal new events of a job, each once, if the claim they were made under still holds.
--
-- ARGV[1]   job id
-- ARGV[2]   fence of the claim
-- ARGV[3]   number of the first entry
-- ARGV[4]   seconds that the stream is kept after its last entry
-- ARGV[5]   1 if there are tokens among the events, else 0
-- ARGV[6..] events, each one JSON document
--
-- Returns 1 if they are in the stream, 2 if a cancel was asked for too, 0 if the claim was lost.

local job_id, fence, first, ttl_s, has_tokens = unpack(ARGV, 1, 5)

if not is_claimed(job_id, fence) then
  return 0
end
allow_writes()
write_events(job_id, first, {unpack(ARGV, 6)}, nil, ttl_s)
if has_tokens == '1' then
  redis.call('HSET', job_key(job_id), 'progress', 1)
end
return 1 + redis.call('EXISTS', cancel_key(job_id))
