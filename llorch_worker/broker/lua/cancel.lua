-- Cancel a job: a waiting job ends here, a running one is left to its worker. Also ends a job whose deadline
-- passes while it waits.
--
-- Claims are scripts too, so a job cannot be claimed while this script looks at it.
--
-- KEYS: inbox lists in which the job may be, if nobody has moved it yet.
--
-- Returns 'queued' (it has now ended and never runs), 'running' (its worker hears of a cancel), 'ended'
-- (it had already ended) or 'unknown' (Redis has no trace of it, and nothing is written).
--
-- Parts: names, wake_ups, message, score, waiting, inbox, usage
-- Writes at maxmemory.

local job_id = ARGV[1]
-- Its result, in the format of Celery's Redis backend. With its time in us it also
-- names this call, which is sent again if its reply is lost.
local document = ARGV[2]
local end_event = ARGV[3]
local keep_s = ARGV[4] -- for results
local stream_s = ARGV[5] -- for event streams
-- How long the record of a job is kept whose message may still come from an inbox.
local record_s = ARGV[6]
local heard = ARGV[7] == '1' -- whether the job waits although it has no record: a stock producer's
local channel = ARGV[8] -- of cancels in this database, or '' to end the job only if it waits
local job, cancel = job_key(job_id), cancel_key(job_id)
local MOST_MOVED = 1000

if #KEYS > 0 and redis.call('HEXISTS', job, 'state') == 0 then
  -- Nobody else hears of what is in the inbox no more.
  local model = empty_inbox(KEYS, MOST_MOVED, let_come) > 0 and model_of(KEYS[1])
  if model then
    wake_for_all(model)
  end
end
local state, reserved, list, sent, first_claim_ms, tenant, cost, reads = unpack(redis.call('HMGET', job, 'state',
  'reserved', 'list', 'sent', 'first_claim_ms', 'tenant', 'cost', 'reads'))
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
settle(job_id, not first_claim_ms and reserved, 0)
if not revoked then
  store_state(job_id, document, keep_s)
end
end_stream(job_id, end_event, stream_s)
redis.call('HINCRBY', job, 'fence', 1)
if not state then
  -- Its message may come from an inbox: see parts/inbox.lua.
  end_record(job_id, record_s, keep_s)
  return 'queued'
end
local model = model_of(list)
redis.call('ZREM', waiting_key(model), job_id)
redis.call('ZREM', scheduled_key(model), job_id)
if state == 'waiting' and not first_claim_ms and cost then
  refund(model, class_of(list), tenant or '', cost, reads == '1')
end
-- Our client's jobs are in no chain or chord.
end_record(job_id, keep_s, keep_s, nil, not sent and 0)
return 'queued'
