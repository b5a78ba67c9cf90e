-- The claimed jobs whose worker renews their leases no more: it is dead, or cut off. Others take them when these end.
--
-- Returns for each the list it was claimed from. Where no worker has died, only one lease is looked at.

local most_jobs = ARGV[1] -- the most leases to look at
local LIVES = 1 / 2 -- A living worker renews a lease four times, and leaves so much of it at least.

local found, now = {}, now_ms()
local leases = redis.call('ZRANGE', LEASES, 0, most_jobs - 1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local lease_ms, list = unpack(redis.pcall('HMGET', job_key(leases[i]), 'lease_ms', 'list'))
  if tonumber(leases[i + 1]) - now >= LIVES * tonumber(lease_ms or 0) then
    break
  end
  found[#found + 1] = list or ''
end
return found
