-- Cancel a job: a waiting job ends here, a running one is left to its worker. Also ends a job whose deadline
-- passes while it waits.
--
-- Claims are scripts too, so a job cannot be claimed while this script looks at it.
--
-- Returns 'queued' (it has now ended and never runs), 'running' (its worker hears of a cancel), 'ended'
-- (it had already ended) or 'unknown' (Redis has no trace of it, and nothing is written).
--
-- Parts: lists, usage
-- Writes at maxmemory.

local job_id = ARGV[1]
-- Its result, in the format of Celery's Redis backend. With its time in us it also
-- names this call, which is sent again if its reply is lost.
local document = ARGV[2]
local end_event = ARGV[3]
local keep_s = ARGV[4] -- for results
local stream_s = ARGV[5] -- for event streams
-- How long the record is kept. The message stays in the queue; the claim that pops it sees the
-- record, drops the message, and leaves what follows the end to a worker.
local record_s = ARGV[6]
local heard = ARGV[7] == '1' -- whether the job waits although it has no record: a stock producer's
local channel = ARGV[8] -- of cancels in this database, or '' to end the job only if it waits
local job, cancel = job_key(job_id), cancel_key(job_id)

local state, reserved = unpack(redis.call('HMGET', job, 'state', 'reserved'))
local revoked = is_revoked_elsewhere(job_id)
if state == 'ended' or not state and not revoked and redis.call('EXISTS', result_key(job_id)) == 1 then
  if redis.call('GET', result_key(job_id)) == document then
    return 'queued'
  end
  return redis.pcall('GET', cancel) == document and 'running' or 'ended'
end
if not (heard or revoked) and redis.call('EXISTS', job) == 0 then
  return 'unknown'
end
local lease_ms = tonumber(redis.call('ZSCORE', LEASES, job_id) or '0')
if state == 'claimed' and lease_ms > now_ms() then
  if channel ~= '' then
    -- The key is for a worker that takes the job over; the message is for the one that runs it.
    redis.call('SET', cancel, document, 'EX', keep_s)
    redis.call('PUBLISH', channel, job_id)
  end
  return 'running'
end
-- It waits, or its worker has died and no sweep has found it yet.
redis.call('DEL', cancel)
redis.call('ZREM', LEASES, job_id)
settle(job_id, not state and reserved, 0)
if not revoked then
  store_state(job_id, document, keep_s)
end
end_stream(job_id, end_event, stream_s)
local message, list = unpack(redis.call('HMGET', job, 'message', 'list'))
redis.call('HINCRBY', job, 'fence', 1)
end_record(job_id, record_s, keep_s)
if message then
  -- It waited for its ETA, or its worker has died: no list has its message.
  redis.pcall('ZREM', scheduled_set(list), job_id) -- somebody may have written another type there
  leave_follow_ups(job_id, message, 0)
else
  redis.call('HSET', job, 'follow', state == 'queued' and 'back' or 1)
  local line = redis.call('HGET', job, 'line')
  if line then
    local gone = gone_key(queue_of(line))
    redis.call('SADD', gone, job_id)
    redis.call('EXPIRE', gone, record_s)
  end
end
return 'queued'
