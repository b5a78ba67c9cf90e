-- Keep the message of a claimed job as a dead letter.
--
-- KEYS[1]  llorch:job:<id>  hash  fence, list, attempts, history
-- KEYS[2]  llorch:dead      list  dead letters, newest first
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; one that was lost, or released already, buries nothing
-- ARGV[3]  why it is dead
-- ARGV[4]  the message, UTF-8
-- ARGV[5]  the most dead letters to keep
--
-- Returns 1 if it was buried, else 0.

local record = redis.call('HMGET', KEYS[1], 'fence', 'list', 'attempts', 'history')
if record[1] ~= ARGV[2] or not record[2] then
  return 0
end
local clock = redis.call('TIME')
-- The trim comes first: a server at maxmemory refuses scripts that begin with a write that grows.
redis.call('LTRIM', KEYS[2], 0, tonumber(ARGV[5]) - 2)
redis.call('LPUSH', KEYS[2], cjson.encode({
  id = ARGV[1], reason = ARGV[3], message = ARGV[4], list = record[2],
  attempts = tonumber(record[3]), history = record[4] or '',
  at_ms = clock[1] * 1000 + math.floor(clock[2] / 1000),
}))
return 1
