-- Store a job's state in the key and format of Celery's Redis backend. A terminal state ends the
-- job, and the claim with it.
--
-- The result and the stream's last events appear together, once. A second caller, or one whose claim
-- was lost, stores nothing. Nor does one whose stream lost entries: its job must run again from the
-- journal.
--
-- Returns 1 if it was stored, now or by an earlier call whose reply was lost, else 0.
--
-- Parts: affinity, usage
-- Writes at maxmemory.

local job_id = ARGV[1]
local fence = ARGV[2] -- '' for a job without a claim
local document = ARGV[3]
local keep_s = ARGV[4] -- for the document
local end_event = ARGV[5] -- JSON, or '' if the state is not terminal
local stream_s = ARGV[6] -- for the event stream
-- How long the caller has for what follows the end, in ms, before a sweep has another worker do it;
-- '' if nothing follows.
local follow_ms = ARGV[7]
local usage = ARGV[8] or '' -- what the job used: see usage.lua
local first = ARGV[9] -- number of the first unwritten entry before the end event
local events = {unpack(ARGV, 10)} -- those entries, JSON documents
local job = job_key(job_id)

local state, holder, idempotency, place, reserved = unpack(redis.call('HMGET', job, 'state', 'fence', 'idempotency',
  'place', 'reserved'))
if fence ~= '' then
  if state ~= 'claimed' or holder ~= fence then
    return state == 'ended' and holder == fence and 1 or 0
  end
  if first and has_gap(job_id, fence, first) then
    return 0
  end
elseif state then
  -- It has ended, or runs, or will run again after a retry.
  return 0
end
if end_event == '' then
  store_state(job_id, document, fence == '' and keep_s)
  return 1
end
-- This does the work of release.lua, to save the worker a call.
redis.call('ZREM', LEASES, job_id)
store_unless_revoked(job_id, document, keep_s, keep_s)
settle(job_id, reserved, count_usage(usage))
end_stream(job_id, end_event, stream_s, first, events)
-- A worker does what follows the end if the caller has not done it in this time.
end_record(job_id, keep_s, keep_s, idempotency, follow_ms ~= '' and now_ms() + follow_ms)
if fence ~= '' and place and place ~= '' then
  -- Unless it has no room: see note_load.
  redis.call('ZADD', load_of(place), 'XX', 'INCR', -1, place)
end
return 1
