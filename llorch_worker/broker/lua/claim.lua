-- Take jobs from the queues: pop each, count its attempt and register its lease, in one step.
--
-- A suspect is a job that may have killed its engine: see release.lua. It waits in a separate list, and runs
-- beside no other suspect until it has made progress.
--
-- The caller looks at everything, so rings for its queues are spent. If it leaves jobs, it rings for the next
-- worker: see doorbell.py. It leaves other workers their share of many jobs. An `urgent` caller has no room, and
-- preempts for what it takes. It gives the high queues only.
--
-- KEYS: the model's workers, the note of what was passed, the list of suspects, then the lists that the caller
-- claims from, the most urgent first. kombu pushes left, so the head is right.
-- ARGV: the caller's terms as JSON: see claims.py.
--
-- A call that was sent before, because its reply was lost, gives the same jobs and takes no others.
--
-- Returns when to look again, in ms from now, or -1; the number of claims; the values of each, see `begin`; then
-- of each dead letter, and of each message whose job had ended, its id, and 'buried' or 'repeated'. All in one
-- array: Redis would send each that lies in another in a packet of its own.
--
-- Parts: lists, bells, tenants, lines, message, letters, take, turns, placing
-- Writes at maxmemory.

local MOST_DROPPED = 10 -- that are returned
-- How long suspects wait for one that runs: the longer it has run, the longer, because then so does a prefill.
local LEAST_WAIT_MS, MOST_WAIT_MS = 10, 200
-- A call settles about this many bytes, because Redis answers nobody meanwhile. Parsing a message takes
-- as long as parsing so many bytes more. Thousands in a row may be of cancelled jobs, or copies.
local MOST_BYTES = 4 * 2^20
local MESSAGE_BYTES = 4096

local workers, passed, suspects = unpack(KEYS, 1, 3)
local terms = cjson.decode(ARGV[1])
terms.suspects = suspects
local limit = terms.limit
local claims, dropped, bytes = {}, {}, 0
local suspect_since_us = false -- when the caller claimed the suspect that it holds
local suspects_line = new_line(suspects)

-- Take the next message of a line; false if its job must wait.
local function take_next(line)
  local list = next_list(line)
  local message = pop(line, list)
  if not message then
    return true
  end
  bytes = bytes + #message + MESSAGE_BYTES
  local job = read_job(message)
  local outcome, found = take(job, message, list, terms, suspect_since_us)
  bring_up(line, list, job, terms.weights)
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
    suspect_since_us = suspect_since_us or is_suspect(job.record, terms) and now_us()
  elseif found and #dropped < MOST_DROPPED then
    dropped[#dropped + 1] = {found, outcome}
  end
  return true
end

local function reply(again_ms)
  local values = {again_ms, #claims}
  for _, parts in ipairs({claims, dropped}) do
    for _, part in ipairs(parts) do
      for _, value in ipairs(part) do
        values[#values + 1] = value
      end
    end
  end
  return values
end

-- Take up to `most` jobs of a line; returns how many.
local function take_from(line, most)
  local before = #claims
  most = math.min(limit, before + most)
  while waiting_in(line) > 0 and #claims < most and bytes < MOST_BYTES and take_next(line) do end
  return #claims - before
end

if terms.sent_before then
  claims = begun_by(terms.call, terms.call_key, terms) or claims
  if #claims > 0 or limit == 0 then
    return reply(0)
  end
end

-- Suspects.
local lines = answer_rings({unpack(KEYS, 4)}, passed, terms)
for _, id in ipairs(terms.suspects_held) do
  local record = read_record(id)
  -- A fence is a time.
  suspect_since_us = suspect_since_us or record and is_suspect(record, terms) and record.fence
end
local others = redis.call('EXISTS', suspects, passed, passed .. FULL_SUFFIX)
if not terms.urgent and others > 0 then
  suspects_line.jobs = length(suspects)
  take_from(suspects_line, limit)
end

-- A job of each line whose turn it is, then from the most urgent on.
local filled, shared_jobs = count_jobs(lines)
local living = shared_jobs > 1 and redis.call('ZCOUNT', workers, now_ms() - terms.gone_ms, '+inf') or 1
local share = math.ceil(shared_jobs / math.max(1, living))
local function serve(line, most)
  local taken = take_from(line, most)
  share = share - (line.is_shared and taken or 0)
  line.had_turn = line.had_turn or taken > 0
  if taken > 0 and others > 0 and not is_high(line.bell) then
    redis.call('DEL', passed .. FULL_SUFFIX)
  end
  return taken
end
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

-- Rings for what is left.
local left = {}
for _, line in ipairs((#claims > 0 or bytes >= MOST_BYTES) and filled or {}) do
  -- The caller alone claims from its own queues.
  left[line.bell] = left[line.bell] or line.is_shared and waiting_in(line) > 0 or nil
end
-- Not for suspects: workers that all hold some would ring for each other for ever. The watcher rings for them.
for bell in pairs(left) do
  ring(bell)
end
if terms.place ~= '' then
  note_load(terms.place, terms.jobs + #claims, #claims < limit)
end

local again_ms = -1
if suspects_line.jobs > 0 then
  local ran_ms = (now_us() - (suspect_since_us or 0)) / 1000
  again_ms = math.floor(math.min(MOST_WAIT_MS, math.max(LEAST_WAIT_MS, ran_ms / 4)))
end
if bytes >= MOST_BYTES and #claims < limit then
  again_ms = 0
end
if #claims > 0 then
  local noted = {terms.call}
  for _, found in ipairs(claims) do
    noted[#noted + 1], noted[#noted + 2] = found[1], found[4]
  end
  redis.call('SET', terms.call_key, cjson.encode(noted), 'PX', math.max(1, terms.lease_ms))
end
return reply(again_ms)
