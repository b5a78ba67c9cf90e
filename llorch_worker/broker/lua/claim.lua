-- Take jobs from the queue: pop, count the attempt and register the lease in one step.
--
-- A worker that dies after this script leaves a lease that lapses; one that dies before it leaves
-- the message in its list. There is no state between.
--
-- A suspect is a job that may have killed its worker: see sweep.lua. It waits in a list of its own,
-- and runs where no other job runs that already lost a worker.
--
-- KEYS[1]    the list of suspects
-- KEYS[2..]  the queue's lists, the most urgent first (kombu pushes left, so the head is right)
-- ARGV[1]    who claims
-- ARGV[2]    the most jobs to take
-- ARGV[3]    id of the suspect that the caller holds, or ''
-- ARGV[4]    lease, ms
-- ARGV[5]    the most attempts of a job
-- ARGV[6]    seconds that results, and the records of ended jobs, are kept
-- ARGV[7]    seconds that an event stream is kept
-- ARGV[8]    the most dead letters to keep
-- ARGV[9]    state of a claimed job, a template with @ID@
-- ARGV[10]   result of a job without attempts left, a template with @ID@
-- ARGV[11]   its last event
-- ARGV[12..] ids of the jobs that the caller holds and that already lost a worker
--
-- Returns a flat list, which Redis sends in one piece: the number of claims; for each of them id,
-- message, attempts, fence, list, ms of its first claim, ms of this one, 1 if nobody claimed it
-- before, 1 if a cancel was asked for, 1 if it is a suspect; then the number of dead letters that
-- are listed here, the number of those that are not, and their bytes; for each listed one its id,
-- or '' if it names no job, and its bytes. One claim may bury a whole queue of junk.

local MOST_LISTED = 10
local suspects = KEYS[1]
local limit, held_suspect = tonumber(ARGV[2]), ARGV[3]
local terms = {
  suspects = suspects, worker = ARGV[1], lease_ms = ARGV[4], max_attempts = tonumber(ARGV[5]),
  keep_s = ARGV[6], stream_s = ARGV[7], most_letters = ARGV[8], started = ARGV[9],
  failure = ARGV[10], end_event = ARGV[11],
}
local redelivered = {unpack(ARGV, 12)}
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

-- Progress clears a suspect, but not one that lost two workers in company: it may have come upon its
-- fatal token after some that were not journalled, and would do so again.
local holds_suspect = false
if held_suspect ~= '' then
  local record = redis.call('HMGET', job_key(held_suspect), 'progress', 'spared')
  holds_suspect = record[1] == '0' or record[2] ~= false
end
if #redelivered == 0 and not holds_suspect then
  -- One that really runs; copies and exhausted jobs do not count.
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

local answer = {#claims}
local function add(values)
  for _, value in ipairs(values) do
    answer[#answer + 1] = value
  end
end
for _, claim in ipairs(claims) do
  add(claim)
end
add({#letters, unlisted, unlisted_bytes})
for _, letter in ipairs(letters) do
  add(letter)
end
return answer
