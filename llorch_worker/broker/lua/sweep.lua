-- Let the jobs of dead workers wait again.
--
-- A worker's death is evidence against no job: what kills an engine, its worker survives, see release.lua. Only
-- `max_deaths` counts it.
--
-- Returns the ids put back.
--
-- Parts: names, wake_ups, score, waiting
-- Writes at maxmemory.

local most_jobs = ARGV[1] -- the most jobs to look at, so that one call stays short
local lease_ms = tonumber(ARGV[2]) -- the caller's

shorten(LEASES, lease_ms, most_jobs)

local back = {}
local lapsed = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, most_jobs)
for _, id in ipairs(lapsed) do
  local job = job_key(id)
  redis.call('ZREM', LEASES, id)
  local state, list, progress, reads = unpack(redis.pcall('HMGET', job, 'state', 'list', 'progress', 'reads'))
  if state == 'claimed' then
    redis.call('HINCRBY', job, 'fence', 1)
    redis.call('HINCRBY', job, 'deaths', 1)
    if progress == '1' then
      redis.call('HDEL', job, 'strikes')
    end
    let_wait(id, list)
    wake(list, reads == '1')
    back[#back + 1] = id
  end
end
return back
