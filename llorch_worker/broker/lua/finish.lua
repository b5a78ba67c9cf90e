-- Store a job's state in the key and format of Celery's Redis backend. A terminal state ends the
-- job, and the claim with it.
--
-- The result and the stream's last events appear together, once. A second caller, or one whose claim
-- was lost, stores nothing.
--
-- Returns 1 if this call or an earlier one under the same claim stored a result, else 0.

local job_id = ARGV[1]
local fence = ARGV[2] -- '' for a job without a claim
local document = ARGV[3]
local keep_s = ARGV[4] -- for the document
local end_event = ARGV[5] -- JSON, or '' if the state is not terminal
local stream_s = ARGV[6] -- for the event stream
local first = ARGV[7] -- number of the first unwritten entry before the end event
local events = {unpack(ARGV, 8)} -- those entries, JSON documents
local job = job_key(job_id)

if fence ~= '' then
  if not is_claimed(job_id, fence) then
    -- The reply to the first call may have been lost.
    local record = redis.call('HMGET', job, 'state', 'fence')
    return record[1] == 'ended' and record[2] == fence and 1 or 0
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
  end_stream(job_id, end_event, stream_s, first, events)
  -- Does the work of release.lua, to save the worker a call. The list stays, because a refused
  -- message is buried after its result is stored, and bury.lua reads the list.
  redis.call('ZREM', LEASES, job_id)
  redis.call('HDEL', job, 'message')
  redis.call('HSET', job, 'state', 'ended')
  redis.call('EXPIRE', job, keep_s)
end
return 1
