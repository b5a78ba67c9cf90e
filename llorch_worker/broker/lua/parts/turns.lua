-- Turns for jobs behind more urgent ones.
--
-- More urgent jobs go first, but not for ever. The first job of a list that was passed for
-- `low_waits_ms` gets its turn, and after MOST_PASSED claims the first of one of the passed lists. The
-- time bounds the wait where jobs are long, the count shares a fleet where they are short. Neither needs
-- the time of a job's enqueueing, which stock producers do not send.
--
-- `passed` is the key of the notes: see keys.py. Lists are given by their positions in
-- `all_lists`, those that the caller claims from.

local MOST_PASSED = 16

-- Whether the jobs behind those of the high `queues`, which a caller without room claims from, have waited too
-- long. It then gets nothing until one of them has had its turn: only a worker with room can give that.
-- The note lasts until a claim with room serves one of them.
local function is_turn_due(passed, queues, low_waits_ms) -- rare
  local behind = {}
  for i, queue in ipairs(queues) do
    behind[i] = queue:sub(1, -#HIGH_SUFFIX - 1)
  end
  add_steps(behind)
  if redis.call('EXISTS', unpack(behind)) == 0 then
    redis.call('DEL', passed .. FULL_SUFFIX)
    return false
  end
  local since_ms = redis.call('GET', passed .. FULL_SUFFIX)
  if not since_ms and low_waits_ms > 0 then
    redis.call('SET', passed .. FULL_SUFFIX, now_ms(), 'PX', 2 * low_waits_ms)
  end
  return now_ms() - (since_ms or now_ms()) >= low_waits_ms
end

-- The notes of these lists: `since_ms`, when claims began to pass each; `due`, those whose turn it is,
-- in order; `had`, to be set for those that get one; `passes` and `turn`, see keys.py.
local function read_turns(passed, all_lists, lists, low_waits_ms) -- rare
  local fields = {'passes', 'turn'}
  for place, i in ipairs(lists) do
    fields[place + 2] = all_lists[i]
  end
  local noted = redis.call('HMGET', passed, unpack(fields))
  local turns = {
    passes = tonumber(noted[1] or 0), turn = tonumber(noted[2] or 0), since_ms = {}, due = {}, had = {},
  }
  local passed_by_urgent_ms = redis.call('GET', passed .. FULL_SUFFIX)
  for place, i in ipairs(lists) do
    local since_ms = tonumber(noted[place + 2] or passed_by_urgent_ms or nil)
    turns.since_ms[i] = math.min(since_ms or now_ms(), now_ms())
    if now_ms() - turns.since_ms[i] >= low_waits_ms then
      turns.due[#turns.due + 1] = i
    end
  end
  if turns.passes >= MOST_PASSED then
    turns.due[#turns.due + 1] = lists[turns.turn % #lists + 1]
    turns.passes, turns.turn = 0, turns.turn + 1
  end
  return turns
end

local function note_turns(passed, all_lists, lists, turns, keep_s) -- rare
  local notes = {'passes', turns.passes, 'turn', turns.turn}
  for _, i in ipairs(lists) do
    notes[#notes + 1] = all_lists[i]
    notes[#notes + 1] = turns.had[i] and now_ms() or turns.since_ms[i]
  end
  redis.call('HSET', passed, unpack(notes))
  redis.call('EXPIRE', passed, keep_s)
end
