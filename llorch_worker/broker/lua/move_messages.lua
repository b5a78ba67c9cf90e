-- Move the messages of jobs of a model out of their records, where an older version kept them: see older_version.py.
--
-- KEYS: perhaps the sorted set in which it kept jobs that wait for their ETA, and that of now.
-- ARGV: the model, then jobs.
--
-- Parts: names
-- Writes at maxmemory.

local TENANTS = 'llorch:tenants:'

-- The inbox list of the same priority, of a list of a tenant, of tenants, of suspects or of one worker.
local function list_now(list)
  list = list:match('^' .. TENANTS .. '([^/]*)') or list
  list = list:gsub(WORKER_MARK .. '[^' .. SUFFIX_MARKS .. ']*', ''):gsub(':suspects$', '')
  return (list:gsub(STEP_SEPARATOR .. '(9?)t$', function(low) return low ~= '' and LOW_SUFFIX or '' end))
end

for _, id in ipairs({unpack(ARGV, 2)}) do
  local record = redis.pcall('HMGET', job_key(id), 'message', 'state', 'list')
  local list = not record.err and record[3] and list_now(record[3])
  if not record.err and (not list or model_of(list) == ARGV[1]) then
    if record[1] and record[1] ~= '' then
      redis.call('SET', message_key(id), record[1])
    end
    redis.call('HDEL', job_key(id), 'message')
    if list then
      redis.call('HSET', job_key(id), 'list', list)
    end
  end
  local due_ms = KEYS[1] and redis.call('ZSCORE', KEYS[1], id)
  if due_ms then
    redis.call('ZREM', KEYS[1], id)
    if record[2] == 'scheduled' then
      redis.call('ZADD', KEYS[2], due_ms, id)
    end
  end
end
