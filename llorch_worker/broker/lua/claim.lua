-- Take jobs from the queues: pop each, count its attempt and register its lease, in one step.
--
-- If a worker dies after this script, its leases lapse; if it dies before, the messages are still in their
-- lists. There is no state in between. A job with a later ETA goes to the model's sorted set.
--
-- A suspect is a job that may have killed its worker: see sweep.lua. It waits in a separate list, and its
-- `peers` bound how many suspects run in one worker at a time, until each has made progress.
--
-- The caller looks at everything, so rings for its queues are spent. If it leaves jobs, it rings for the next
-- worker: see doorbell.py. It leaves other workers their share of many jobs.
--
-- An `urgent` caller has no room, and preempts for what it takes. It gives the high queues only.
--
-- KEYS: the model's workers, the note of what was passed, the scheduled jobs, the list of suspects, then the
-- lists that the caller claims from, the most urgent first. kombu pushes left, so the head is right.
-- ARGV: the caller's terms as JSON: see claims.py.
--
-- Returns when to look again, in ms from now, or -1; how many dead letters are not listed; their bytes;
-- the number of claims; the values of each: id, message, attempts, fence, list, ms of its first claim, ms
-- of this one, 1 if it is the first claim, 1 if a cancel was requested, 1 if it is a suspect, its ETA in
-- ms, or nil for none that can be read, ms of its retry, or nil; then of each listed dead letter, and of
-- each message whose job had ended, its id, or '' if it names no job, its bytes, and 'buried' or 'repeated'.
-- All in one array: Redis would send each that lies in another in a packet of its own. Thousands of messages
-- in a row may be of cancelled jobs, copies or junk; the next call goes on with them.

local MOST_LISTED = 10
local SUSPECTS_WAIT_MS = 200 -- about the time to a first token
-- A call settles about this many bytes, because Redis answers nobody meanwhile. Parsing a message takes
-- as long as parsing so many bytes more.
local MOST_BYTES = 4 * 2^20
local MESSAGE_BYTES = 4096

local workers, passed, scheduled, suspects = unpack(KEYS, 1, 4)
local lines = {}
for i = 5, #KEYS do
  lines[i - 4] = new_line(KEYS[i])
end
local terms = cjson.decode(ARGV[1])
terms.suspects = suspects
local limit = terms.limit
local claims, dropped, unlisted, unlisted_bytes, bytes = {}, {}, 0, 0, 0
local most_peers, suspects_held = math.huge, 0
local suspects_line = new_line(suspects)
local reschedules = false

-- Take the next message of a line; false if its job must wait.
local function take_next(line)
  local list = next_list(line)
  local message = pop(line, list)
  if not message then
    return true
  end
  bytes = bytes + #message + MESSAGE_BYTES
  local job = read_job(message)
  local outcome, found, peers = take(job, message, list, terms, most_peers, suspects_held)
  if list == line.tenants and not job.came_back then
    next_of_tenant(list, message, terms.weights)
  end
  if waiting_in(line) == 0 then
    redis.call('HDEL', tenants_key(line.tenants), '*turns')
  end
  if outcome == 'wait' and line == suspects_line then
    redis.call('RPUSH', list, message)
    line.jobs = line.jobs + 1
    return false
  elseif outcome == 'wait' then
    -- A second copy of its message, or its last attempt was handed back. It must not hold up others.
    redis.call('LPUSH', suspects, message)
    suspects_line.jobs = suspects_line.jobs + 1
  elseif outcome == 'claimed' then
    claims[#claims + 1] = found
    if peers then
      most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
    end
  elseif outcome == 'scheduled' then
    reschedules = true
  elseif (outcome == 'buried' or outcome == 'repeated') and #dropped < MOST_LISTED then
    dropped[#dropped + 1] = {found, #message, outcome}
  elseif outcome == 'buried' then
    unlisted, unlisted_bytes = unlisted + 1, unlisted_bytes + #message
  end
  return true
end

-- Take up to `most` jobs of a line; returns how many.
local function take_from(line, most)
  local before = #claims
  most = math.min(limit, before + most)
  while waiting_in(line) > 0 and #claims < most and bytes < MOST_BYTES and take_next(line) do end
  return #claims - before
end

-- Spend the rings for all lines. Returns those that the caller may claim from.
local function spend_rings()
  -- The first write must not grow: see allow_writes. Otherwise that is the DEL.
  if terms.urgent then
    allow_writes()
  end
  local turn_is_due = terms.urgent and is_turn_due(passed, lines, terms.low_waits_ms)
  local bells, open = {}, {}
  for _, line in ipairs(lines) do
    -- A worker with room has taken the ring, or one that is about to wait for it must give a turn first.
    local is_anothers = line.is_shared and terms.urgent and (turn_is_due or redis.call('EXISTS', line.bell) == 0)
    if not turn_is_due and not is_anothers then
      open[#open + 1] = line
    end
    if not is_anothers then
      bells[#bells + 1] = line.bell
    end
    bells[#bells + 1] = rings_for_full(line.bell) and line.bell .. FULL_SUFFIX or nil
  end
  redis.call('DEL', unpack(bells))
  return open
end

lines = spend_rings()
for _, id in ipairs(terms.suspects_held) do
  local record = read_record(id)
  local peers = record and peers_of(record, terms)
  if peers then
    most_peers, suspects_held = math.min(most_peers, peers), suspects_held + 1
  end
end
local next_due
local others = redis.call('EXISTS', scheduled, suspects, passed, passed .. FULL_SUFFIX)
if not terms.urgent and others > 0 then
  next_due = first_due(scheduled)
  if next_due and next_due <= now_ms() then
    release_due(scheduled, limit)
    reschedules = true
  end
  suspects_line.jobs = length(suspects)
  take_from(suspects_line, limit)
end

local filled, shared_jobs = count_jobs(lines)
local share = shared_jobs
if shared_jobs > 1 then
  share = math.ceil(shared_jobs / math.max(1, redis.call('ZCOUNT', workers, now_ms() - terms.gone_ms, '+inf')))
end
local function serve(line, most)
  local taken = take_from(line, most)
  share = share - (line.is_shared and taken or 0)
  line.had_turn = line.had_turn or taken > 0
  if taken > 0 and others > 0 and not is_high(line.bell) then
    redis.call('DEL', passed .. FULL_SUFFIX)
  end
  return taken
end

-- Claim a job of each line whose turn it is, then from the most urgent on.
local lower = {unpack(filled, terms.urgent and #filled + 1 or 2)}
local turns = #lower > 0 and read_turns(passed, lower, terms.low_waits_ms)
for _, line in ipairs(turns and turns.due or {}) do
  serve(line, 1)
end
for place, line in ipairs(filled) do
  if terms.place ~= '' and line.is_shared and line.jobs > 1 and #claims < limit then
    bytes = bytes + bring_forward(line.list, terms.place, math.min(share, limit - #claims))
  end
  local taken = serve(line, line.is_shared and share or limit)
  if turns and place == 1 then
    turns.passes = turns.passes + taken
  end
end
if not terms.urgent and (turns or others > 0) then
  note_turns(passed, lines, lower, turns, terms.keep_s)
end

-- Ring for what is left.
local left = {}
for _, line in ipairs((#claims > 0 or bytes >= MOST_BYTES) and filled or {}) do
  -- The caller alone claims from its own queues.
  left[line.bell] = left[line.bell] or line.is_shared and waiting_in(line) > 0 or nil
end
local again_ms = -1
if reschedules then
  next_due = first_due(scheduled)
end
if next_due then
  again_ms = math.max(0, next_due - now_ms())
end
if suspects_line.jobs > 0 then
  again_ms = again_ms < 0 and SUSPECTS_WAIT_MS or math.min(again_ms, SUSPECTS_WAIT_MS)
  -- Another worker may take it. One that was rung for it and may not does not ring on: workers that
  -- all hold suspects would never stop.
  left[suspects_line.bell] = left[suspects_line.bell] or not terms.rung or nil
end
for bell in pairs(left) do
  ring(bell)
end
if bytes >= MOST_BYTES and #claims < limit then
  again_ms = 0
end
if terms.place ~= '' then
  note_load(terms.place, terms.jobs + #claims, #claims < limit)
end

local reply = {again_ms, unlisted, unlisted_bytes, #claims}
for _, parts in ipairs({claims, dropped}) do
  for _, part in ipairs(parts) do
    for _, value in ipairs(part) do
      reply[#reply + 1] = value
    end
  end
end
return reply
