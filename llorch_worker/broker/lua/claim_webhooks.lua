-- Claim webhooks whose time has come: until the lease ends, no other gateway gets them.

local limit = tonumber(ARGV[1])
local lease_ms = tonumber(ARGV[2])

local now = now_ms()
local due = redis.call('ZRANGEBYSCORE', WEBHOOKS, '-inf', now, 'LIMIT', 0, limit)
for _, id in ipairs(due) do
  redis.call('ZADD', WEBHOOKS, now + lease_ms, id)
end
return due
