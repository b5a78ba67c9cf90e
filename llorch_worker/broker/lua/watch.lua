-- Do what a model's watcher does: move the inbox, let scheduled jobs wait whose time has come, and wake workers for what waits.
--
-- KEYS: the model's inbox lists.
--
-- Returns in how many ms to look again, because more is to be moved or the next scheduled job is due, or -1; then the
-- ids of messages that were dropped because their jobs had ended, the first few.
--
-- Parts: names, wake_ups, message, score, waiting, inbox
-- Writes at maxmemory.

local model = ARGV[1]
local wakes_anyway = ARGV[2] == '1' -- also for jobs whose wake-up somebody may have taken and lost
local MOST_DUE = 100 -- of the scheduled jobs, so that one call stays short
local MOST_MOVED = 1000 -- likewise

local moved, is_more, repeated = empty_inbox(KEYS, MOST_MOVED, let_come)
local released = release_due(model, MOST_DUE)
for _, class in ipairs((moved + released > 0 or wakes_anyway) and classes_that_wait(model) or {}) do
  wake_class(model, class, redis.call('ZCOUNT', waiting_key(model), bounds_of(class, 'texts')) > 0)
end
local next_ms = first_due(model)
local again_ms = next_ms and math.max(1, math.ceil(next_ms - now_us() / 1000)) or -1
return {is_more and 0 or again_ms, unpack(repeated)}
