-- A text that differs whenever the list of dead letters has changed: a new letter changes its head, and one
-- that goes its length.

return redis.call('LLEN', DEAD_LETTERS) .. ' ' .. (redis.call('LINDEX', DEAD_LETTERS, 0) or '')
