-- A text that differs whenever the list of dead letters has changed: a new letter changes its head, and one
-- that goes its length. The newest letter, which may be as long as a prompt, stays in Redis.

local newest = redis.call('LINDEX', DEAD_LETTERS, 0)
return redis.call('LLEN', DEAD_LETTERS) .. ' ' .. redis.sha1hex(newest or '')
