-- Delete up to `most` jobs of a queue that wait, in its inbox lists and those that were moved from there.
--
-- KEYS: the queue's inbox lists.
--
-- Returns how many they were.
--
-- Parts: names, score, usage
-- Writes at maxmemory.

local queue, most = ARGV[1], tonumber(ARGV[2])
local model, jobs = model_of(queue), 0
for _, list in ipairs(KEYS) do
  local length = redis.pcall('LLEN', list) -- an error: somebody's key of another type
  if type(length) == 'number' then
    redis.call('DEL', list)
    jobs = jobs + length
  end
end
local classes = class_of(queue) == HIGH and {HIGH} or {NORMAL, LOW}
for _, class in ipairs(classes) do
  local first, last = bounds_of(class)
  local found = redis.call('ZRANGEBYSCORE', waiting_key(model), first, last, 'LIMIT', 0, math.max(0, most - jobs))
  for _, id in ipairs(found) do
    local idempotency, reserved, tenant, cost, first_claim_ms, reads = unpack(redis.pcall('HMGET', job_key(id),
      'idempotency', 'reserved', 'tenant', 'cost', 'first_claim_ms', 'reads'))
    if not first_claim_ms then
      settle(id, reserved, 0)
      refund(model, class, tenant or '', cost or 0, reads == '1')
    end
    redis.call('ZREM', waiting_key(model), id)
    -- A job that was claimed before has traces that do not expire.
    redis.call('DEL', job_key(id), message_key(id), events_key(id), cancel_key(id))
    if not is_revoked_elsewhere(id) then
      redis.call('DEL', result_key(id))
    end
    if idempotency and redis.call('GET', idempotency) == id then
      redis.call('DEL', idempotency)
    end
    jobs = jobs + 1
  end
end
return jobs
