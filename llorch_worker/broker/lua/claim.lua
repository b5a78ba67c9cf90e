-- Take jobs from the queue: pop, count the attempt and register the lease in one step.
--
-- If a worker dies after this script, its lease lapses; if it dies before, the message is still in
-- its list. There is no state in between. A job with a later ETA waits in the model's sorted set.
--
-- A suspect is a job that may have killed its worker: see sweep.lua. It waits in a separate list, and
-- its `peers` bound how many suspects run in one worker at a time, until each has made progress.
--
-- KEYS: the list of suspects, the scheduled jobs, then the queue's lists, the most urgent first (kombu
-- pushes left, so the head is right).
--
-- Returns the claims, each {id, message, attempts, fence, list, ms of its first claim, ms of this one,
-- 1 if it is the first claim, 1 if a cancel was requested, 1 if it is a suspect, its ETA in ms, or nil
-- for none that can be read, ms of its retry, or nil}; the dead letters, each {id, or '' if it names no job; bytes}; how many
-- more dead letters there are; their bytes; when to look again, in ms from now, or -1. Thousands of
-- messages in a row may be of cancelled jobs, copies or junk; the next call goes on with them.

local MOST_LISTED = 10
local SUSPECTS_WAIT_MS = 200 -- about the time to a first token
-- A call settles about this many bytes, because Redis answers nobody meanwhile. Parsing a message takes
-- as long as parsing so many bytes more.
local MOST_BYTES, MESSAGE_BYTES = 4 * 2^20, 4096
local suspects, scheduled = KEYS[1], KEYS[2]
local terms = {
  suspects = suspects,
  worker = ARGV[1], -- who claims
  lease_ms = ARGV[2],
  max_attempts = tonumber(ARGV[3]),
  max_deaths = tonumber(ARGV[4]),
  keep_s = ARGV[5], -- for results and records of ended jobs
  stream_s = ARGV[6], -- for event streams of ended jobs
  most_letters = ARGV[7],
  started = ARGV[8], -- state of a claimed job, a template with @ID@
  failure = ARGV[9], -- result of a job without attempts left, a template with @ID@
  end_event = ARGV[10], -- its last event
  cancel_event = ARGV[11], -- the last event of a revoked job
}
local limit = tonumber(ARGV[12]) -- the most jobs to take
local held_suspects = {unpack(ARGV, 13)} -- ids of the suspects that the caller holds
local claims, letters, unlisted, unlisted_bytes = {}, {}, 0, 0
local most_peers, suspects_held = math.huge, 0
local bytes = 0

-- Take the next message of a list; false if the list is empty or its next job must wait.
local function take_next(list)
  local message = redis.call('RPOP', list)
  if not message then
    return false
  end
  bytes = bytes + #message + MESSAGE_BYTES
  local outcome, found, peers = take(message, list, terms, most_peers, suspects_held)
  if outcome == 'wait' and list == suspects then
    redis.call('RPUSH', list, message)
    return false
  elseif outcome == 'wait' then
    -- A second copy of its message, or its last attempt was handed back. It must not hold up others.
    redis.call('LPUSH', suspects, message)
  elseif outcome == 'claimed' then
    claims[#claims + 1] = found
    if peers then
      most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
    end
  elseif outcome == 'buried' and #letters < MOST_LISTED then
    letters[#letters + 1] = {found, #message}
  elseif outcome == 'buried' then
    unlisted, unlisted_bytes = unlisted + 1, unlisted_bytes + #message
  end
  return true
end

allow_writes()
for _, id in ipairs(held_suspects) do
  local record = read_record(id)
  local peers = record and peers_of(record, terms)
  if peers then
    most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
  end
end
release_due(scheduled, limit)
for i, list in ipairs(KEYS) do
  while i ~= 2 and #claims < limit and bytes < MOST_BYTES and take_next(list) do end
end

local again_ms = -1
local next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
if next_due then
  again_ms = math.max(0, next_due - now_ms())
end
if redis.call('EXISTS', suspects) == 1 then
  again_ms = again_ms < 0 and SUSPECTS_WAIT_MS or math.min(again_ms, SUSPECTS_WAIT_MS)
end
if bytes >= MOST_BYTES and #claims < limit then
  again_ms = 0
end
return {claims, letters, unlisted, unlisted_bytes, again_ms}
