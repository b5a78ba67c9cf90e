-- Put the jobs of dead workers back to the head of their queues.
--
-- Two kinds of jobs may have killed the worker and become suspects: jobs without progress since
-- their claim, and jobs that had lost a worker before and ran beside others that had. At most one
-- of the latter is to blame, so once per job this attempt does not count: no job ends because of
-- its neighbour. They stay suspects.
--
-- Returns the ids put back.

local most_jobs = ARGV[1] -- the most jobs to look at, so that one call stays short

local back = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, most_jobs)) do
  -- The first write, which cannot grow: see allow_writes.
  redis.call('ZREM', LEASES, id)
  local job = job_key(id)
  local state, message, list, progress, company, spared = unpack(redis.call('HMGET', job,
    'state', 'message', 'list', 'progress', 'company', 'spared'))
  if state == 'claimed' then
    redis.call('HINCRBY', job, 'fence', 1)
    redis.call('HSET', job, 'state', 'queued')
    redis.call('HDEL', job, 'message')
    local in_company = company == '1' and not spared
    if in_company then
      redis.call('HINCRBY', job, 'attempts', -1)
      redis.call('HSET', job, 'spared', 1)
    end
    if progress == '0' or in_company or spared then
      redis.call('LPUSH', suspects_list(list), message)
    else
      redis.call('RPUSH', list, message)
    end
    back[#back + 1] = id
  end
end
return back
