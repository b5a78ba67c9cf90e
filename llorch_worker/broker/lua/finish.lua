-- Store a job's state in the key and format of Celery's Redis backend. A terminal state ends the
-- job, and the claim with it.
--
-- The result and the stream's last events appear together, once: whoever comes second, or comes
-- with a claim that was lost, stores nothing.
--
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; '' for a job that nobody claimed
-- ARGV[3]  the document
-- ARGV[4]  seconds that it is kept
-- ARGV[5]  the last event, one JSON document, or '' if the state is not terminal
-- ARGV[6]  seconds that the stream is kept
-- ARGV[7]  number of the first entry that is still to be written before the last event
-- ARGV[8..] those entries, each one JSON document
--
-- Returns 1 if it was stored, else 0.

local job_id, fence, document, keep_s, end_event, stream_s, first = unpack(ARGV, 1, 7)
local job = job_key(job_id)

if fence ~= '' then
  if not is_claimed(job_id, fence) then
    return 0
  end
else
  local state = redis.call('HGET', job, 'state')
  if state == 'claimed' or state == 'ended' then
    return 0
  end
end
allow_writes()
store_state(job_id, document, keep_s)
if end_event ~= '' then
  end_stream(job_id, end_event, stream_s, first, {unpack(ARGV, 8)})
  -- As release.lua would, so that the worker need not come back for it. The list stays: a refused
  -- message is buried after its result, and that needs the list.
  redis.call('ZREM', LEASES, job_id)
  redis.call('HDEL', job, 'message')
  redis.call('HSET', job, 'state', 'ended')
  redis.call('EXPIRE', job, keep_s)
end
return 1
