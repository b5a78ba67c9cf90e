-- Do what a model's watcher does: move the inbox, let scheduled jobs wait whose time has come, and wake workers for what waits.
--
-- KEYS: the model's inbox lists.
--
-- Returns in how many ms to look again, because more is to be moved or the next scheduled job is due, or -1; a list that
-- was left, because its messages are large, or ''; then the ids of messages that were dropped because their jobs had
-- ended, the first few.
--
-- Parts: names, wake_ups, message, score, waiting, inbox
-- Writes at maxmemory.

local model = ARGV[1]
local wakes_anyway = ARGV[2] == '1' -- also for jobs whose wake-up somebody may have taken and lost
-- A list that was left, and whose last message is staged: the call that did so, the message without its body, and how
-- many bytes it has; only the list if it cannot be staged. It has not changed meanwhile.
local left, staging, head, message_bytes = unpack(ARGV, 3)
local MOST_DUE = 100 -- of the scheduled jobs, so that one call stays short
local MOST_MOVED = 1000 -- likewise

-- Take the staged message; false if only all of it says whose it is.
local function take_staged()
  local list = list_of_priority(left)
  local job = job_of(head, list)
  if job.id:find('unread-', 1, true) == 1 or redis.call('EXISTS', staged_key(staging)) == 0 then
    return false
  end
  redis.call('LTRIM', left, 0, -2)
  job.staged, job.tokens = staged_key(staging), tokens_of(tonumber(message_bytes))
  if job.is_new then
    let_come(job)
  else
    note_copy(job, head, list)
  end
  return true, job.state == 'ended' and job.list and job.id or nil
end

-- First: what is in the inbox came later.
local released = release_due(model, MOST_DUE)
local has_taken, ended
if staging then
  has_taken, ended = take_staged()
end
local large = ''
local moved, is_more, repeated = empty_inbox(KEYS, MOST_MOVED, let_come, function(key)
  large = (has_taken or key ~= left) and key or large
  return large == key
end)
repeated[#repeated + 1] = ended
moved = moved + (has_taken and 1 or 0)
if moved + released > 0 or wakes_anyway then
  wake_for_all(model)
end
local next_ms = first_due(model)
local again_ms = next_ms and math.max(1, math.ceil(next_ms - now_us() / 1000)) or -1
return {is_more and 0 or again_ms, large, unpack(repeated)}
