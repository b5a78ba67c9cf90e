-- Turns for jobs behind more urgent ones.
--
-- More urgent jobs go first, but not for ever. The first job of a list that was passed for
-- `low_waits_ms` gets its turn, and after MOST_PASSED claims the first of one of the passed lists. The
-- time bounds the wait where jobs are long, the count shares a fleet where they are short. Neither needs
-- the time of a job's enqueueing, which stock producers do not send.
--
-- `passed` is the key of the notes: see keys.py. Lines are those of lines.lua.

local MOST_PASSED = 16

-- Whether the jobs behind those of the high `lines`, which a caller without room claims from, have waited too
-- long. It then gets nothing until one of them has had its turn: only a worker with room can give that.
-- The note lasts until a claim with room serves one of them.
local function is_turn_due(passed, lines, low_waits_ms)
  local behind = 0
  for _, line in ipairs(lines) do
    local normal = line.list:sub(1, -#HIGH_SUFFIX - 1)
    for _, list in ipairs({normal, normal .. LOW_SUFFIX}) do
      behind = behind + length(list) + length(tenants_list(list))
    end
  end
  if behind == 0 then
    redis.call('DEL', passed .. FULL_SUFFIX)
    return false
  end
  local since_ms = redis.call('GET', passed .. FULL_SUFFIX)
  if not since_ms and low_waits_ms > 0 then
    redis.call('SET', passed .. FULL_SUFFIX, now_ms(), 'PX', 2 * low_waits_ms)
  end
  return now_ms() - (since_ms or now_ms()) >= low_waits_ms
end

-- Spend the rings for these lists. Returns the lines of those that the caller may claim from.
local function answer_rings(lists, passed, terms)
  local lines = {}
  for i, list in ipairs(lists) do
    lines[i] = new_line(list)
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

-- The notes of these lines: when claims began to pass each, in its `since_ms`. Returns those whose turn it
-- is, in order, as `due`; `passes` and `turn`, see keys.py.
local function read_turns(passed, lines, low_waits_ms)
  local fields = {}
  for i, line in ipairs(lines) do
    fields[i] = line.list
  end
  local noted = redis.call('HMGET', passed, 'passes', 'turn', unpack(fields))
  local turns = {passes = tonumber(noted[1] or 0), turn = tonumber(noted[2] or 0), due = {}}
  local passed_by_urgent_ms = redis.call('GET', passed .. FULL_SUFFIX)
  for i, line in ipairs(lines) do
    line.since_ms = math.min(tonumber(noted[i + 2] or passed_by_urgent_ms or nil) or now_ms(), now_ms())
    if now_ms() - line.since_ms >= low_waits_ms then
      turns.due[#turns.due + 1] = line
    end
  end
  if turns.passes >= MOST_PASSED then
    turns.due[#turns.due + 1] = lines[turns.turn % #lines + 1]
    turns.passes, turns.turn = 0, turns.turn + 1
  end
  return turns
end

-- Note since when claims have passed each of the `lower` lines, and forget it of the other `lines`: they are empty,
-- or first. Jobs that come to them later, or are passed later, have not waited since then.
local function note_turns(passed, lines, lower, turns, keep_s)
  local others = {}
  for _, line in ipairs(lines) do
    others[line.list] = true
  end
  local notes = turns and {'passes', turns.passes, 'turn', turns.turn}
  for _, line in ipairs(lower) do
    others[line.list] = nil
    notes[#notes + 1] = line.list
    notes[#notes + 1] = line.had_turn and now_ms() or line.since_ms
  end
  for list in pairs(others) do
    redis.call('HDEL', passed, list)
  end
  if notes then
    redis.call('HSET', passed, unpack(notes))
    redis.call('EXPIRE', passed, keep_s)
  end
end
