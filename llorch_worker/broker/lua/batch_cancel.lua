-- Note the request to cancel a batch, unless it has ended. Returns 1 if it is noted.

local id = ARGV[1]
local at_s = ARGV[2]

if not redis.call('ZSCORE', BATCH_LEASES, id) then
  return 0
end
redis.call('HSETNX', gateway_document_key(id), 'cancelling_at', at_s)
return 1
