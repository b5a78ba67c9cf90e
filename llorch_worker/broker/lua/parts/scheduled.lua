-- Jobs that wait for their ETA.

-- When the first scheduled job is due, in ms; nil if there is none, or somebody's key of another type.
local function first_due(scheduled)
  return tonumber((redis.pcall('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]))
end

local RETRY_MS = 1000 -- when to look again at a list that takes no jobs

-- Put up to `limit` jobs whose ETA has come at the head of their queues, the earliest in front. Returns
-- their lists.
local function release_due(scheduled, limit)
  local due = redis.pcall('ZRANGEBYSCORE', scheduled, '-inf', now_ms(), 'LIMIT', 0, limit)
  local lists = {}
  for i = #due, 1, -1 do
    local id = due[i]
    local state, list, message = unpack(redis.call('HMGET', job_key(id), 'state', 'list', 'message'))
    local goes = state == 'scheduled' and takes_jobs(list)
    if state == 'scheduled' and not goes then
      redis.call('ZADD', scheduled, now_ms() + RETRY_MS, id)
    else
      redis.call('ZREM', scheduled, id)
    end
    if goes then
      redis.call('HSET', job_key(id), 'state', 'queued')
      redis.call('HDEL', job_key(id), 'message', 'list')
      redis.call('RPUSH', list, message)
      lists[#lists + 1] = list
    end
  end
  return lists
end
