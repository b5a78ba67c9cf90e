-- Take pieces of work whose time has come: see leases.py.
--
-- KEYS: the sorted set of the work.
--
-- Returns their ids; they are the caller's for `lease_ms`.

local lease_ms, most, latest_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local token = ARGV[4] -- the new fence of their documents, or ''

allow_writes()
shorten(KEYS[1], latest_ms, most)
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, most)
for _, id in ipairs(due) do
  redis.call('ZADD', KEYS[1], now_ms() + lease_ms, id)
  if token ~= '' then
    redis.call('HSET', gateway_document_key(id), 'fence', token)
  end
end
return due
