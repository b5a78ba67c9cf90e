-- Renew the leases of a worker's jobs.
--
-- ARGV[2..] are pairs: job id, fence.
--
-- Returns the places of the pairs whose claims the caller has lost, from 1 on; it must stop work on
-- those jobs.
--
-- Writes at maxmemory.

local lease_ms = ARGV[1]

local until_ms = now_ms() + lease_ms
local lost = {}
for i = 2, #ARGV, 2 do
  if is_claimed(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, until_ms, ARGV[i])
  else
    lost[#lost + 1] = i / 2
  end
end
return lost
