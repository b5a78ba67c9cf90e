-- Give a job a place among those that a gateway's key may have in flight.
--
-- KEYS: the sorted set of places.
--
-- Returns 1 if it has one, 0 if all are taken.

local job_id = ARGV[1]
local limit = tonumber(ARGV[2])
local keep_s = ARGV[3] -- for the places of a key that is no longer used

if redis.call('ZCARD', KEYS[1]) >= limit and not redis.call('ZSCORE', KEYS[1], job_id) then
  return 0
end
redis.call('ZADD', KEYS[1], now_ms(), job_id)
redis.call('EXPIRE', KEYS[1], keep_s)
return 1
