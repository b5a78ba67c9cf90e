-- Take jobs from the queue: pop, count the attempt and register the lease in one step.
--
-- If a worker dies after this script, its lease lapses; if it dies before, the message is still in
-- its list. There is no state in between.
--
-- A suspect is a job that may have killed its worker: see sweep.lua. It waits in a separate list
-- and never runs beside another job that has lost a worker.
--
-- KEYS: the list of suspects, then the queue's lists, the most urgent first (kombu pushes left, so
-- the head is right).
--
-- Returns the claims, each {id, message, attempts, fence, list, ms of its first claim, ms of this one,
-- 1 if it is the first claim, 1 if a cancel was requested, 1 if it is a suspect}; the dead letters,
-- each {id, or '' if it names no job; bytes}; how many more dead letters there are; their bytes. One
-- claim may bury a whole queue of junk.

local MOST_LISTED = 10
local suspects = KEYS[1]
local terms = {
  suspects = suspects,
  worker = ARGV[1], -- who claims
  lease_ms = ARGV[2],
  max_attempts = tonumber(ARGV[3]),
  keep_s = ARGV[4], -- for results and records of ended jobs
  stream_s = ARGV[5], -- for event streams
  most_letters = ARGV[6],
  started = ARGV[7], -- state of a claimed job, a template with @ID@
  failure = ARGV[8], -- result of a job without attempts left, a template with @ID@
  end_event = ARGV[9], -- its last event
}
local limit = tonumber(ARGV[10]) -- the most jobs to take
local held_suspect = ARGV[11] -- id of the suspect that the caller holds, or ''
local redelivered = {unpack(ARGV, 12)} -- ids of the caller's jobs that have lost a worker
local redelivered_before = #redelivered
local claims, letters, unlisted, unlisted_bytes = {}, {}, 0, 0

-- Take the next message of a list; false if the list is empty or its next job must wait. The pop is
-- the script's first write and cannot grow: see allow_writes.
local function take_next(list, redelivery_allowed)
  local message = redis.call('RPOP', list)
  if not message then
    return false
  end
  local outcome, found = take(message, list, terms, redelivery_allowed)
  if outcome == 'wait' then
    redis.call('RPUSH', list, message)
    return false
  elseif outcome == 'claimed' then
    local id, attempts = found[1], found[3]
    found[#found + 1] = list == suspects and 1 or 0
    claims[#claims + 1] = found
    if attempts > 1 then
      redelivered[#redelivered + 1] = id
    end
  elseif outcome == 'buried' and #letters < MOST_LISTED then
    letters[#letters + 1] = {found, #message}
  elseif outcome == 'buried' then
    unlisted, unlisted_bytes = unlisted + 1, unlisted_bytes + #message
  end
  return true
end

-- Progress clears a suspect, but not one that lost two workers in company: it may have reached its
-- fatal token after some that were not journalled, and may reach it again.
local holds_suspect = false
if held_suspect ~= '' then
  local record = redis.call('HMGET', job_key(held_suspect), 'progress', 'spared')
  holds_suspect = record[1] == '0' or record[2] ~= false
end
if #redelivered == 0 and not holds_suspect then
  -- A redelivered job that really runs; copies and exhausted jobs do not count.
  while #claims == 0 and take_next(suspects, true) do end
  holds_suspect = #claims > 0
end

for i = 2, #KEYS do
  while #claims < limit and take_next(KEYS[i], not holds_suspect) do end
end

if #redelivered > 1 and #redelivered > redelivered_before then
  for _, id in ipairs(redelivered) do
    redis.call('HSET', job_key(id), 'company', 1)
  end
end

return {claims, letters, unlisted, unlisted_bytes}
