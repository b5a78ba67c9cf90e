-- Put the jobs of dead workers back to the head of their queues.
--
-- A job without progress since its claim may have killed the worker. It becomes a suspect, and so
-- does each other job without progress of that worker. Suspects are divided into halves: each may
-- next run beside at most half as many suspects as this time. A death counts as a strike; progress
-- clears the strikes, so that an innocent job survives any number of deaths around it, up to
-- `max_deaths`. In its last attempt a job is a suspect whatever it does, and alone.
--
-- Returns the ids put back.

local most_jobs = ARGV[1] -- the most jobs to look at, so that one call stays short
local lease_ms = tonumber(ARGV[2]) -- the caller's
local max_deaths = tonumber(ARGV[3])

allow_writes()
shorten(LEASES, lease_ms, most_jobs)

local back, lost_by = {}, {}
local lapsed = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, most_jobs)
for i = #lapsed, 1, -1 do
  -- Latest first: each goes to the head, so the earliest ends up in front.
  local id, job = lapsed[i], job_key(lapsed[i])
  redis.call('ZREM', LEASES, id)
  local state, message, list, progress, worker, peers = unpack(redis.call('HMGET', job,
    'state', 'message', 'list', 'progress', 'worker', 'peers'))
  if state == 'claimed' and not (takes_jobs(list) and takes_jobs(suspects_list(list))) then
    redis.call('ZADD', LEASES, now_ms() + lease_ms, id)
  elseif state == 'claimed' then
    redis.call('HINCRBY', job, 'fence', 1)
    redis.call('HSET', job, 'state', 'queued')
    redis.call('HDEL', job, 'message')
    local last_attempt = redis.call('HINCRBY', job, 'deaths', 1) >= max_deaths - 1
    if progress == '1' then
      redis.call('HDEL', job, 'strikes', 'peers', 'alone')
    end
    if progress == '1' and not last_attempt then
      redis.call('RPUSH', list, message)
    else
      lost_by[worker] = lost_by[worker] or {}
      table.insert(lost_by[worker], 1, {job, message, list, tonumber(peers or nil)})
    end
    back[#back + 1] = id
  end
end

for _, lost in pairs(lost_by) do
  for _, suspect in ipairs(lost) do
    local job, message, list, peers = unpack(suspect, 1, 4)
    local together = math.min(peers or #lost, #lost)
    redis.call('HINCRBY', job, 'strikes', 1)
    -- Jobs on their first attempt may run beside a suspect that has no peers; they are not to blame.
    -- A suspect that had peers may have lost its worker beside one whose lease has not lapsed yet.
    redis.call('HSET', job, 'alone', together == 1 and (peers or 1) == 1 and 1 or 0,
      'peers', math.max(1, math.floor(together / 2)))
    redis.call('LPUSH', suspects_list(list), message)
  end
end
return back
