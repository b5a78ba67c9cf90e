-- Take pieces of work whose time has come: see leases.py.
--
-- KEYS: the sorted set of the work.
--
-- Returns their ids; they are the caller's for `lease_ms`. With a lease of 0 it only lists them.
--
-- Writes at maxmemory.

local lease_ms, most, latest_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local token = ARGV[4] -- the new fence of their documents, or ''
local chosen = {unpack(ARGV, 5)} -- the ids to take, or none for the earliest

shorten(KEYS[1], latest_ms, most)
local due = {}
for _, id in ipairs(chosen) do
  local at_ms = tonumber(redis.call('ZSCORE', KEYS[1], id) or nil)
  if at_ms and at_ms <= now_ms() then
    due[#due + 1] = id
  end
end
if #chosen == 0 then
  due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, most)
end
for _, id in ipairs(lease_ms > 0 and due or {}) do
  redis.call('ZADD', KEYS[1], now_ms() + lease_ms, id)
  if token ~= '' then
    redis.call('HSET', gateway_document_key(id), 'fence', token)
  end
end
return due
