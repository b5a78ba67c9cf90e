-- Jobs that wait for their ETA.

-- When the first scheduled job is due, in ms; nil if there is none, or somebody's key of another type.
local function first_due(scheduled)
  return tonumber((redis.pcall('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]))
end

local RETRY_MS = 1000 -- when to look again at a list that takes no jobs
local MOST_SEARCHED = 1000 -- due jobs that a search for high ones reads, so that it stays short

-- Put up to `limit` jobs whose ETA has come at the head of their queues, the earliest in front; the high
-- ones only, if the caller says so. Returns their lists.
local function release_due(scheduled, limit, high_only)
  local found, first = {}, 0
  repeat
    local due = redis.pcall('ZRANGEBYSCORE', scheduled, '-inf', now_ms(), 'LIMIT', first, limit)
    for _, id in ipairs(due) do
      local state, list = unpack(redis.call('HMGET', job_key(id), 'state', 'list'))
      if state ~= 'scheduled' or not high_only or is_high(bell_of(list)) then
        found[#found + 1] = {id, state, list}
      end
    end
    first = first + #due
  until not high_only or #due < limit or #found >= limit or first >= MOST_SEARCHED
  local lists = {}
  for i = math.min(#found, limit), 1, -1 do
    local id, state, list = unpack(found[i])
    local goes = state == 'scheduled' and takes_jobs(list)
    if state == 'scheduled' and not goes then
      redis.call('ZADD', scheduled, now_ms() + RETRY_MS, id)
    else
      redis.call('ZREM', scheduled, id)
    end
    if goes then
      local message = redis.call('HGET', job_key(id), 'message')
      redis.call('HSET', job_key(id), 'state', 'queued')
      redis.call('HDEL', job_key(id), 'message', 'list')
      redis.call('RPUSH', list, message)
      lists[#lists + 1] = list
    end
  end
  return lists
end
