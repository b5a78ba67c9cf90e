-- Move messages of a list of an older version into an inbox list: see older_version.py.
--
-- KEYS: the list, the inbox list. ARGV: how many at most.
--
-- Returns how many.
--
-- Writes at maxmemory.

local moved = 0
while moved < tonumber(ARGV[1]) do
  local message = redis.pcall('RPOP', KEYS[1]) -- an error: somebody's key of another type
  if type(message) ~= 'string' then
    break
  end
  redis.call('LPUSH', KEYS[2], message)
  moved = moved + 1
end
return moved
