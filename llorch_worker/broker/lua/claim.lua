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
-- An `urgent` caller has no room. It gives the high queues only, and preempts for what it takes.
--
-- KEYS: the number of workers, the note of what was passed, the bells of the queues, those for workers
-- without room, the scheduled jobs, the list of suspects, then the queues' lists, the most urgent first
-- (kombu pushes left, so the head is right). Each step of priority has one list for each queue, in the
-- order of the bells; a step with tenants has as many more. The steps between the first and the last,
-- which stock producers seldom use, are looked at if the rings say so. An urgent caller gives
-- the lists of all steps, and all lists behind these after them.
--
-- Returns when to look again, in ms from now, or -1; how many dead letters are not listed; their bytes;
-- the number of claims; the values of each: id, message, attempts, fence, list, ms of its first claim, ms
-- of this one, 1 if it is the first claim, 1 if a cancel was requested, 1 if it is a suspect, its ETA in
-- ms, or nil for none that can be read, ms of its retry, or nil; then of each listed dead letter its id,
-- or '' if it names no job, and its bytes. All in one array: Redis would send each that lies in another
-- in a packet of its own. Thousands of messages in a row may be of cancelled jobs, copies or junk; the
-- next call goes on with them.

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
  place = ARGV[13], -- the caller's, see placing.lua, or '' if no jobs are placed there
}
local limit = tonumber(ARGV[12]) -- the most jobs to take
local jobs_before = tonumber(ARGV[14]) -- how many the caller runs
local low_waits_ms = tonumber(ARGV[15]) -- how long jobs may be passed
local weights = ARGV[16] -- of tenants
local urgent = ARGV[17] == '1' -- whether the caller has no room
local queues = tonumber(ARGV[18])
local bells = tonumber(ARGV[19]) -- how many
local rings = tonumber(ARGV[20]) -- the bits of those that made the caller look
local LAST = #KEYS - tonumber(ARGV[21]) -- position of the last list that the caller claims from
local held_suspects = {unpack(ARGV, 22)} -- ids of the suspects that the caller holds
local workers = KEYS[1]
local passed = KEYS[2]
local scheduled = KEYS[3 + bells]
local SUSPECTS = 4 + bells -- positions in KEYS
local MAIN = SUSPECTS + queues -- nearly all jobs wait here: the last queue's list without a priority
local suspects = KEYS[SUSPECTS]
terms.suspects = suspects
local claims, letters, unlisted, unlisted_bytes = {}, {}, 0, 0
local most_peers, suspects_held = math.huge, 0
local bytes = 0
local waiting = {[SUSPECTS] = 0} -- jobs, by position in KEYS
local tenants_at = {} -- position of a plain list -> that of its tenants list, if it holds jobs
local filled_lists = {} -- positions of the plain lists with jobs, in them or of tenants, the most urgent first
local reschedules = false
local serves_lower = false -- whether a list behind the high ones gave a job

local function bell_at(i)
  return KEYS[3 + (i - SUSPECTS - 1) % queues]
end
local function is_shared(i) -- whether any worker may take its jobs
  return not bell_at(i):find(WORKER_MARK, 1, true)
end

-- Whether a worker with room has taken the ring for the jobs that an urgent caller asks for: see
-- doorbell.py.
local is_answered = false
for i = 3, urgent and 2 + queues or 0 do
  is_answered = is_answered or rings_for_full(KEYS[i]) and redis.call('LLEN', KEYS[i]) == 0
end

-- Note how many jobs wait in each list, from position `first` on.
local function count_waiting(first)
  local last = math.min(first + queues - 1, LAST)
  if redis.call('EXISTS', unpack(KEYS, first, last)) > 0 then
    for i = first, last do
      waiting[i] = redis.call('LLEN', KEYS[i])
      if waiting[i] > 0 and i > SUSPECTS and not (is_answered and is_shared(i)) then
        local plain = i
        if is_tenants_list(KEYS[i]) then
          plain = i - queues
          waiting[plain] = waiting[plain] or 0
          tenants_at[plain] = i
          waiting[i] = waiting[i] + waiting_behind(KEYS[i])
        end
        if plain == i or waiting[plain] == 0 then
          filled_lists[#filled_lists + 1] = plain
        end
      end
    end
  end
  if last < LAST then
    count_waiting(last + 1)
  end
end

-- How many jobs wait at a plain list's position, those of tenants included.
local function waiting_at(i)
  return waiting[i] + (waiting[tenants_at[i]] or 0)
end

-- Take the next message at a position; false if there is none or its job must wait.
local function take_next(i)
  local tenants = tenants_at[i]
  if tenants and waiting[tenants] > 0
      and (waiting[i] == 0 or not is_plain_lists_turn(KEYS[tenants])) then
    i = tenants
  end
  local list = KEYS[i]
  local message = redis.call('RPOP', list)
  if not message then
    waiting[i] = 0
    return i == tenants
  end
  bytes = bytes + #message + MESSAGE_BYTES
  waiting[i] = waiting[i] - 1
  local job = read_job(message)
  local outcome, found, peers = take(job, message, list, terms, most_peers, suspects_held)
  if i == tenants and not job.came_back then
    next_of_tenant(list, message, weights)
  end
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
  local before = #claims
  while waiting_at(i) > 0 and #claims < math.min(most, limit) and bytes < MOST_BYTES
      and take_next(i) do end
  if #claims > before and i > SUSPECTS and not is_high(bell_at(i)) then
    serves_lower = true
  end
end

-- The first write, which cannot grow: see allow_writes.
local spent = redis.call('DEL', unpack(KEYS, 3, 2 + bells))
if not urgent and (rings >= FOR_SELDOM or spent > 0) then
  local place = SUSPECTS + 2 * queues -- behind the lists of the first step
  local lower = {unpack(KEYS, place + 1)}
  for step = 1, LOW_STEP - 1 do
    for i = SUSPECTS + 1, MAIN do
      place = place + 1
      KEYS[place] = KEYS[i] .. STEP_SEPARATOR .. step
    end
  end
  for i, list in ipairs(lower) do
    KEYS[place + i] = list
  end
  LAST = place + #lower
end
for _, id in ipairs(held_suspects) do
  local record = read_record(id)
  local peers = record and peers_of(record, terms)
  if peers then
    most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
  end
end
-- Nearly all keys are empty: one command rules out many.
local next_due
local passed_by_urgent = passed .. FULL_SUFFIX -- see is_turn_due
local filled = urgent and 0 or redis.call('EXISTS', passed_by_urgent, unpack(KEYS, SUSPECTS - 1))
if filled > 0 then
  waiting[MAIN] = redis.call('LLEN', KEYS[MAIN])
  filled = filled - (waiting[MAIN] > 0 and 1 or 0)
end
if urgent and is_turn_due(passed, {unpack(KEYS, LAST + 1)}, low_waits_ms) then
  -- It leaves the jobs, so the ring stays for a worker with room that is about to wait for it.
  for i = 3, is_answered and 0 or 2 + queues do
    if rings_for_full(KEYS[i]) then
      ring_once(KEYS[i])
    end
  end
elseif urgent then
  count_waiting(SUSPECTS + 1)
elseif filled > 0 then
  next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
  if next_due and tonumber(next_due) <= now_ms() then
    release_due(scheduled, limit)
    reschedules = true
  end
  count_waiting(SUSPECTS)
elseif waiting[MAIN] then
  filled_lists[1] = MAIN
end

table.sort(filled_lists)
local all = 0
for _, i in ipairs(filled_lists) do
  all = all + (is_shared(i) and waiting_at(i) or 0)
end
local share = all
if all > 1 then
  share = math.ceil(all / math.max(1, tonumber(redis.call('GET', workers) or 1)))
end
if not urgent then
  take_from(SUSPECTS, limit)
end

-- Claim a job of each list whose turn it is.
local lower = {unpack(filled_lists, urgent and #filled_lists + 1 or 2)}
local turns = #lower > 0 and read_turns(passed, lower, low_waits_ms)
for _, i in ipairs(turns and turns.due or {}) do
  local before = #claims
  take_from(i, before + 1)
  turns.had[i] = turns.had[i] or #claims > before
  share = share - (is_shared(i) and #claims - before or 0)
end
for place, i in ipairs(filled_lists) do
  local before = #claims
  if terms.place ~= '' and is_shared(i) and waiting[i] > 1 and before < limit then
    bytes = bytes + bring_forward(KEYS[i], terms.place, math.min(share, limit - before))
  end
  take_from(i, is_shared(i) and before + share or limit)
  if is_shared(i) then
    share = share - (#claims - before)
  end
  if turns and place == 1 then
    turns.passes = turns.passes + #claims - before
  elseif turns then
    turns.had[i] = turns.had[i] or #claims > before
  end
end
if turns then
  note_turns(passed, lower, turns, terms.keep_s)
end
if serves_lower and filled > 0 then
  redis.call('DEL', passed_by_urgent)
end
if terms.place ~= '' then
  note_load(terms.place, jobs_before + #claims, #claims < limit)
end

local again_ms = -1
if reschedules then
  next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
end
if next_due then
  again_ms = math.max(0, next_due - now_ms())
end
local left = {} -- bell -> whether jobs are left in lists that are seldom used
for _, i in ipairs(#claims > 0 and filled_lists or {}) do
  if waiting_at(i) > 0 and is_shared(i) then
    left[bell_at(i)] = left[bell_at(i)] or is_seldom(KEYS[i])
  end
end
if waiting[SUSPECTS] > 0 then
  again_ms = again_ms < 0 and SUSPECTS_WAIT_MS or math.min(again_ms, SUSPECTS_WAIT_MS)
  -- Another worker may take it. One that was rung for it and may not does not ring on: workers that
  -- all hold suspects would never stop.
  if rings % FOR_SELDOM ~= RUNG then
    left[bell_of(suspects)] = left[bell_of(suspects)] or false
  end
end
for bell, seldom in pairs(left) do
  ring(bell, seldom)
end
if bytes >= MOST_BYTES and #claims < limit then
  again_ms = 0
end
local reply = {again_ms, unlisted, unlisted_bytes, #claims}
for _, parts in ipairs({claims, letters}) do
  for _, part in ipairs(parts) do
    for _, value in ipairs(part) do
      reply[#reply + 1] = value
    end
  end
end
return reply
