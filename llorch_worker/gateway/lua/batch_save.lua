-- Save the progress of a batch if its driver still has the lease, and renew or end the lease.
--
-- KEYS: for each new file its record and the index of its owner's files.
--
-- Returns {0}, or {1, when a cancel was requested or ''} if it was saved.
--
-- Writes at maxmemory.

local id = ARGV[1]
local token = ARGV[2]
local lease_ms = ARGV[3] -- '' if the batch has ended
local keep_s = ARGV[4] -- for the record of a batch that has ended
local counts = ARGV[5]
local document = ARGV[6] -- '' if only the counts have changed
local files = {unpack(ARGV, 7)} -- of each new file: id, time, '' or when it expires, document
local batch = gateway_document_key(id)

local fence = redis.call('HGET', batch, 'fence')
if fence ~= token then
  -- The reply to its end may have been lost.
  return fence == token .. ':ended' and lease_ms == '' and {1, ''} or {0}
end
redis.call('HSET', batch, 'counts', counts)
if document ~= '' then
  redis.call('HSET', batch, 'document', document)
end
for i = 1, #KEYS, 2 do
  local first = (i - 1) / 2 * 4 + 1
  local file, added, expires_at, saved = unpack(files, first, first + 3)
  redis.call('HSET', KEYS[i], 'document', saved)
  redis.call('ZADD', KEYS[i + 1], added, file)
  if expires_at ~= '' then
    redis.call('ZADD', FILES_DUE, expires_at, file)
  end
end
if lease_ms == '' then
  -- A renewal that is still on its way must not bring the lease back.
  redis.call('HSET', batch, 'fence', token .. ':ended')
  redis.call('ZREM', BATCH_LEASES, id)
  redis.call('EXPIRE', batch, keep_s)
else
  redis.call('ZADD', BATCH_LEASES, now_ms() + tonumber(lease_ms), id)
end
return {1, redis.call('HGET', batch, 'cancelling_at') or ''}
