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
-- KEYS: the number of workers, the note of what was passed, the scheduled jobs, the list of suspects, the
-- queues, the most urgent first, then their bells, and those for workers without room. An urgent caller
-- gives the high queues. Each queue has a list of its name (kombu pushes left, so the head is right), and
-- one for each step of priority and for the tenants of a step. Those are looked at if the rings say so, or
-- if nothing else is there.
--
-- Returns when to look again, in ms from now, or -1; how many dead letters are not listed; their bytes;
-- the number of claims; the values of each: id, message, attempts, fence, list, ms of its first claim, ms
-- of this one, 1 if it is the first claim, 1 if a cancel was requested, 1 if it is a suspect, its ETA in
-- ms, or nil for none that can be read, ms of its retry, or nil; then of each listed dead letter, and of
-- each message whose job had ended, its id, or '' if it names no job, its bytes, and 'buried' or 'repeated'.
-- All in one array: Redis would send each that lies in another in a packet of its own. Thousands of messages
-- in a row may be of cancelled jobs, copies or junk; the next call goes on with them.

local FIXED_KEYS = 4 -- before the queues
local FIXED_ARGUMENTS = 10 -- before the suspects that the caller holds
local MOST_LISTED = 10
local SUSPECTS_WAIT_MS = 200 -- about the time to a first token
-- A call settles about this many bytes, because Redis answers nobody meanwhile. Parsing a message takes
-- as long as parsing so many bytes more.
local MOST_BYTES = 4 * 2^20
local MESSAGE_BYTES = 4096

-- How many of these jobs the caller may claim.
local function share_of(jobs) -- rare
  return math.ceil(jobs / math.max(1, tonumber(redis.call('GET', KEYS[1]) or 1)))
end

-- Claim jobs of all kinds. `looks_at_all`: also from the lists that are mostly empty. Returns the reply.
local function claim_in_order(terms, limit, urgent, rings, queues, looks_at_all) -- rare
  local passed, scheduled, suspects = unpack(KEYS, 2, FIXED_KEYS)
  local passed_by_urgent = passed .. FULL_SUFFIX -- see is_turn_due
  -- The lists that the caller claims from, the most urgent first: for each step one of each queue.
  local lists = {unpack(KEYS, FIXED_KEYS + 1, FIXED_KEYS + queues)}
  local SUSPECTS, MAIN = 0, queues -- positions in `lists`
  lists[SUSPECTS], terms.suspects = suspects, suspects
  local claims, letters, unlisted, unlisted_bytes = {}, {}, 0, 0
  local most_peers, suspects_held = math.huge, 0
  local bytes = 0
  local waiting = {[SUSPECTS] = 0} -- jobs, by position
  local tenants_at = {} -- position of a plain list -> that of its tenants list, if it holds jobs
  local filled_lists = {} -- positions of the plain lists with jobs, in them or of tenants, the most urgent first
  local reschedules = false
  local serves_lower = false -- whether a list behind the high ones gave a job

  local function bell_at(i)
    return KEYS[FIXED_KEYS + queues + 1 + (i - 1) % queues]
  end
  local function is_shared(i) -- whether any worker may take its jobs
    return not bell_at(i):find(WORKER_MARK, 1, true)
  end

  -- Whether a worker with room has taken the ring for the jobs that an urgent caller asks for: see
  -- doorbell.py.
  local is_answered = false
  if urgent then
    for i = 1, queues do
      local bell = bell_at(i)
      is_answered = is_answered or rings_for_full(bell) and redis.call('LLEN', bell) == 0
    end
    redis.call('DEL', unpack(KEYS, FIXED_KEYS + queues + 1, #KEYS))
  end

  local function add_other_lists()
    if #lists == queues then
      add_steps(lists)
    end
  end

  -- Note how many jobs wait in each list.
  local function count_at(i)
    local jobs = redis.pcall('LLEN', lists[i])
    waiting[i] = type(jobs) == 'number' and jobs or 0 -- a key of another type holds none
    if waiting[i] == 0 or is_answered and is_shared(i) then
      return
    end
    local plain = i
    if is_tenants_list(lists[i]) then
      plain = i - queues
      waiting[plain] = waiting[plain] or 0
      tenants_at[plain] = i
      waiting[i] = waiting[i] + waiting_behind(lists[i])
    end
    if plain == i or waiting[plain] == 0 then
      filled_lists[#filled_lists + 1] = plain
    end
  end
  local function count_waiting()
    for first = 1, #lists, queues do
      local last = first + queues - 1
      if redis.call('EXISTS', unpack(lists, first, last)) > 0 then
        for i = first, last do
          count_at(i)
        end
      end
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
        and (waiting[i] == 0 or not is_plain_lists_turn(lists[tenants])) then
      i = tenants
    end
    local list = lists[i]
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
      next_of_tenant(list, message, terms.weights)
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
    elseif (outcome == 'buried' or outcome == 'repeated') and #letters < MOST_LISTED then
      letters[#letters + 1] = {found, #message, outcome}
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

  for _, id in ipairs({unpack(ARGV, FIXED_ARGUMENTS + 1)}) do
    local record = read_record(id)
    local peers = record and peers_of(record, terms)
    if peers then
      most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
    end
  end
  -- Nearly all keys are empty: one command rules out many.
  local next_due
  if looks_at_all or redis.call('EXISTS', unpack(lists)) == 0 then
    add_other_lists()
  end
  local filled = urgent and 0 or redis.call('EXISTS', passed_by_urgent, scheduled, suspects, unpack(lists))
  if filled > 0 then
    waiting[MAIN] = redis.call('LLEN', lists[MAIN])
    filled = filled - (waiting[MAIN] > 0 and 1 or 0)
  end
  if urgent and is_turn_due(passed, {unpack(lists, 1, queues)}, terms.low_waits_ms) then
    -- It leaves the jobs, so the ring stays for a worker with room that is about to wait for it.
    for i = 1, queues do
      if not is_answered and rings_for_full(bell_at(i)) then
        ring_once(bell_at(i), true)
      end
    end
  elseif urgent then
    count_waiting()
  elseif filled > 0 then
    next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
    if next_due and tonumber(next_due) <= now_ms() then
      release_due(scheduled, limit)
      reschedules = true
      add_other_lists()
    end
    waiting[SUSPECTS] = redis.call('LLEN', suspects)
    count_waiting()
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
    share = share_of(all)
  end
  if not urgent then
    take_from(SUSPECTS, limit)
  end

  -- Claim a job of each list whose turn it is.
  local lower = {unpack(filled_lists, urgent and #filled_lists + 1 or 2)}
  local turns = #lower > 0 and read_turns(passed, lists, lower, terms.low_waits_ms)
  for _, i in ipairs(turns and turns.due or {}) do
    local before = #claims
    take_from(i, before + 1)
    turns.had[i] = turns.had[i] or #claims > before
    share = share - (is_shared(i) and #claims - before or 0)
  end
  for place, i in ipairs(filled_lists) do
    local before = #claims
    if terms.place ~= '' and is_shared(i) and waiting[i] > 1 and before < limit then
      bytes = bytes + bring_forward(lists[i], terms.place, math.min(share, limit - before))
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
    note_turns(passed, lists, lower, turns, terms.keep_s)
  end
  if serves_lower and filled > 0 then
    redis.call('DEL', passed_by_urgent)
  end
  local again_ms = -1
  if reschedules then
    next_due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
  end
  if next_due then
    again_ms = math.max(0, next_due - now_ms())
  end
  local left = {} -- bell -> whether jobs are left elsewhere than in its queue's own list
  for _, i in ipairs((#claims > 0 or bytes >= MOST_BYTES) and filled_lists or {}) do
    local elsewhere = i > queues or waiting_at(i) > waiting[i]
    -- The caller alone claims from its own queues, but may not look elsewhere the next time.
    if waiting_at(i) > 0 and (is_shared(i) or elsewhere) then
      left[bell_at(i)] = left[bell_at(i)] or elsewhere
    end
  end
  if waiting[SUSPECTS] > 0 then
    again_ms = again_ms < 0 and SUSPECTS_WAIT_MS or math.min(again_ms, SUSPECTS_WAIT_MS)
    -- Another worker may take it. One that was rung for it and may not does not ring on: workers that
    -- all hold suspects would never stop.
    if rings % ELSEWHERE == 0 then
      left[bell_of(suspects)] = left[bell_of(suspects)] or false
    end
  end
  for bell, elsewhere in pairs(left) do
    ring(bell, elsewhere)
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
end

-- Functions of their own, so that the usual call does not define what they use.
local function is_share_one(bell, jobs, limit) -- rare
  return not bell:find(WORKER_MARK, 1, true) and (limit == 1 or share_of(jobs) == 1)
end
local function begin_with_own(list, place) -- rare
  if place ~= '' then
    bring_forward(list, place, 1)
  end
end
local function leave_rest(bell) -- rare
  ring(bell, false)
end

-- Claim a new job of the last queue's own list: nearly always nothing waits elsewhere, and the caller's share
-- is one. Returns the reply; nil if it is not so.
local function claim_one(terms, limit, queues)
  local list, bell = KEYS[FIXED_KEYS + queues], KEYS[FIXED_KEYS + 2 * queues]
  if redis.call('EXISTS', KEYS[2] .. FULL_SUFFIX, unpack(KEYS, 3, FIXED_KEYS + queues)) ~= 1 then
    return nil
  end
  local jobs = redis.call('LLEN', list)
  if jobs == 0 or jobs > 1 and not is_share_one(bell, jobs, limit) then
    return nil
  end
  if jobs > 1 then
    begin_with_own(list, terms.place)
  end
  local message = redis.call('RPOP', list)
  local id, eta_ms = read_message(message)
  local known = id and eta_ms == nil and redis.pcall('HMGET', job_key(id), 'state', 'idempotency')
  if not known or known.err or known[1] or is_revoked_elsewhere(id) then
    redis.call('RPUSH', list, message)
    return nil
  end
  if jobs > 1 then
    leave_rest(bell)
  end
  return {-1, 0, 0, 1, unpack(begin(id, message, shared_list(list), new_record(known[2]), terms))}
end

local terms = setmetatable({
  worker = ARGV[1], -- who claims
  lease_ms = ARGV[2],
  started = ARGV[3], -- state of a claimed job, a template with @ID@
  place = ARGV[4], -- the caller's, see placing.lua, or '' if no jobs are placed there
}, {__index = function(terms, name) -- what few claims need: see claims.py
  for each, value in pairs(cjson.decode(ARGV[5])) do
    terms[each] = value
  end
  return rawget(terms, name) or error('no term is named ' .. name)
end})
local limit = tonumber(ARGV[6]) -- the most jobs to take
local jobs_before = ARGV[7] -- how many the caller runs
local urgent = ARGV[8] == '1' -- whether the caller has no room
local rings = tonumber(ARGV[9]) -- the bits of those that made the caller look
local queues = tonumber(ARGV[10]) -- how many
local holds_suspects = #ARGV > FIXED_ARGUMENTS -- behind them their ids

-- The first write, which cannot grow: see allow_writes.
local spent = urgent and 0 or redis.call('DEL', unpack(KEYS, FIXED_KEYS + queues + 1, #KEYS))
local looks_at_all = urgent or rings >= ELSEWHERE or spent > 0
local reply
if not looks_at_all and not holds_suspects and limit > 0 then
  reply = claim_one(terms, limit, queues)
end
reply = reply or claim_in_order(terms, limit, urgent, rings, queues, looks_at_all)
local taken = reply[4]
if terms.place ~= '' then
  note_load(terms.place, jobs_before + taken, taken < limit)
end
return reply
