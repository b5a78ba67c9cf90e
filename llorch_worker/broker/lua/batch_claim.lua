-- Take the lease of a batch that no living gateway drives.
--
-- Returns {id, document}, or false if every batch is driven.

local token = ARGV[1] -- the new fence: whoever held the lease before can save nothing more
local lease_ms = tonumber(ARGV[2])

shorten(BATCH_LEASES, lease_ms, -1)
local due = redis.call('ZRANGEBYSCORE', BATCH_LEASES, '-inf', now_ms())
for _, id in ipairs(due) do
  local document = redis.call('HGET', gateway_document_key(id), 'document')
  if document then
    redis.call('ZADD', BATCH_LEASES, now_ms() + lease_ms, id)
    redis.call('HSET', gateway_document_key(id), 'fence', token)
    return {id, document}
  end
  redis.call('ZREM', BATCH_LEASES, id)
end
return false
