-- Put the jobs of dead workers back to the head of their queues.
--
-- A worker's death is evidence against no job: what kills an engine, its worker survives, see release.lua. Only
-- `max_deaths` counts it.
--
-- Returns the ids put back.
--
-- Parts: lists
-- Writes at maxmemory.

local most_jobs = ARGV[1] -- the most jobs to look at, so that one call stays short
local lease_ms = tonumber(ARGV[2]) -- the caller's
local max_deaths = tonumber(ARGV[3])

shorten(LEASES, lease_ms, most_jobs)

local back, suspects = {}, {}
local lapsed = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, most_jobs)
for i = #lapsed, 1, -1 do
  -- Latest first: each goes to the head, so the earliest ends up in front.
  local id, job = lapsed[i], job_key(lapsed[i])
  redis.call('ZREM', LEASES, id)
  local state, message, list, progress, strikes, deaths = unpack(redis.call('HMGET', job,
    'state', 'message', 'list', 'progress', 'strikes', 'deaths'))
  strikes = progress ~= '1' and strikes
  -- In its last attempt it is a suspect whatever it does.
  local suspect = strikes or tonumber(deaths or 0) + 1 >= max_deaths - 1
  local target = list and (suspect and suspects_list(list) or list)
  if state == 'claimed' and not takes_jobs(target) then
    redis.call('ZADD', LEASES, now_ms() + lease_ms, id)
  elseif state == 'claimed' then
    redis.call('HINCRBY', job, 'fence', 1)
    redis.call('HSET', job, 'state', 'queued')
    redis.call('HDEL', job, 'message')
    redis.call('HINCRBY', job, 'deaths', 1)
    if not strikes then
      redis.call('HDEL', job, 'strikes')
    end
    if suspect then
      table.insert(suspects, 1, {target, message})
    else
      redis.call('RPUSH', target, message)
    end
    back[#back + 1] = id
  end
end
for _, suspect in ipairs(suspects) do
  redis.call('LPUSH', suspect[1], suspect[2])
end
return back
