-- Take jobs from the queue: pop, count the attempt and register the lease in one step.
--
-- If a worker dies after this script, its lease lapses; if it dies before, the message is still in
-- its list. There is no state in between. A job with a later ETA waits in the model's sorted set.
--
-- A suspect is a job that may have killed its worker: see sweep.lua. It waits in a separate list, and
-- its `peers` bound how many suspects run in one worker at a time, until each has made progress.
--
-- The caller looks at everything, so rings for its queues are spent. If it leaves jobs, it rings for
-- the next worker: see doorbell.py. It leaves other workers their share of many jobs.
--
-- KEYS: the number of workers, the bells of the queues, the scheduled jobs, the list of suspects, then
-- the queues' lists, the most urgent first (kombu pushes left, so the head is right). Each step of
-- priority has one list for each queue, in the order of the bells.
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
local terms = {
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
local queues = tonumber(ARGV[13])
local rung = ARGV[14] == '1' -- whether a ring made the caller look
local held_suspects = {unpack(ARGV, 15)} -- ids of the suspects that the caller holds
local workers = KEYS[1]
local bells = {unpack(KEYS, 2, 1 + queues)}
local scheduled = KEYS[2 + queues]
local SUSPECTS = 3 + queues -- positions in KEYS
local MAIN = SUSPECTS + queues -- nearly all jobs wait here: the last queue's list without a priority
local suspects = KEYS[SUSPECTS]
terms.suspects = suspects
local claims, letters, unlisted, unlisted_bytes = {}, {}, 0, 0
local most_peers, suspects_held = math.huge, 0
local bytes = 0
local waiting = {[SUSPECTS] = 0} -- jobs, by position in KEYS
local filled_lists = {} -- positions of the queues' lists that hold jobs, the most urgent first
local reschedules = false

-- Note how many jobs wait in each list, from position `first` on.
local function count_waiting(first)
  local last = math.min(first + queues - 1, #KEYS)
  if redis.call('EXISTS', unpack(KEYS, first, last)) > 0 then
    for i = first, last do
      waiting[i] = redis.call('LLEN', KEYS[i])
      if waiting[i] > 0 and i > SUSPECTS then
        filled_lists[#filled_lists + 1] = i
      end
    end
  end
  if last < #KEYS then
    count_waiting(last + 1)
  end
end

-- Take the next message of a list; false if the list is empty or its next job must wait.
local function take_next(i)
  local list = KEYS[i]
  local message = redis.call('RPOP', list)
  if not message then
    return false
  end
  bytes = bytes + #message + MESSAGE_BYTES
  waiting[i] = waiting[i] - 1
  local outcome, found, peers = take(message, list, terms, most_peers, suspects_held)
  if outcome == 'wait' then
    waiting[SUSPECTS] = waiting[SUSPECTS] + 1
  end
  if outcome == 'wait' and i == SUSPECTS then
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
  elseif outcome == 'scheduled' then
    reschedules = true
  elseif outcome == 'buried' and #letters < MOST_LISTED then
    letters[#letters + 1] = {found, #message}
  elseif outcome == 'buried' then
    unlisted, unlisted_bytes = unlisted + 1, unlisted_bytes + #message
  end
  return true
end

-- Take jobs of a list until the call has `most` claims.
local function take_from(i, most)
  while waiting[i] > 0 and #claims < math.min(most, limit) and bytes < MOST_BYTES
      and take_next(i) do end
end

-- The first write, which cannot grow: see allow_writes.
redis.call('DEL', unpack(bells))
for _, id in ipairs(held_suspects) do
  local record = read_record(id)
  local peers = record and peers_of(record, terms)
  if peers then
    most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
  end
end
-- Nearly all keys are empty: one command rules out many.
local next_due
local filled = redis.call('EXISTS', unpack(KEYS, SUSPECTS - 1))
if filled > 0 then
  waiting[MAIN] = redis.call('LLEN', KEYS[MAIN])
  filled = filled - (waiting[MAIN] > 0 and 1 or 0)
end
if filled > 0 then
  next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
  if next_due and tonumber(next_due) <= now_ms() then
    release_due(scheduled, limit)
    reschedules = true
  end
  count_waiting(SUSPECTS)
elseif waiting[MAIN] then
  filled_lists[1] = MAIN
end

local function bell_at(i)
  return bells[(i - SUSPECTS - 1) % queues + 1]
end
local function is_shared(i) -- whether any worker may take its jobs
  return not bell_at(i):find(WORKER_MARK, 1, true)
end

local all = 0
for _, i in ipairs(filled_lists) do
  all = all + (is_shared(i) and waiting[i] or 0)
end
local share = all
if all > 1 then
  share = math.ceil(all / math.max(1, tonumber(redis.call('GET', workers) or 1)))
end
take_from(SUSPECTS, limit)
for _, i in ipairs(filled_lists) do
  local before = #claims
  take_from(i, is_shared(i) and before + share or limit)
  if is_shared(i) then
    share = share - (#claims - before)
  end
end

local again_ms = -1
if reschedules then
  next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
end
if next_due then
  again_ms = math.max(0, next_due - now_ms())
end
local left = {} -- bell -> true
for _, i in ipairs(#claims > 0 and filled_lists or {}) do
  if waiting[i] > 0 and is_shared(i) then
    left[bell_at(i)] = true
  end
end
if waiting[SUSPECTS] > 0 then
  again_ms = again_ms < 0 and SUSPECTS_WAIT_MS or math.min(again_ms, SUSPECTS_WAIT_MS)
  -- Another worker may take it. One that was rung for it and may not does not ring on: workers that
  -- all hold suspects would never stop.
  if not rung then
    left[bell_of(suspects)] = true
  end
end
for bell in pairs(left) do
  ring(bell)
end
if bytes >= MOST_BYTES and #claims < limit then
  again_ms = 0
end
return {claims, letters, unlisted, unlisted_bytes, again_ms}
