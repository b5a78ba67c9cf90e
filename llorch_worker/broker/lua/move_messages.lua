-- Move the messages of jobs out of their records, where an older version kept them: see older_version.py.
--
-- KEYS: perhaps the sorted set in which it kept jobs that wait for their ETA, and that of now.
-- ARGV: jobs.
--
-- Writes at maxmemory.

for _, id in ipairs(ARGV) do
  local record = redis.pcall('HMGET', job_key(id), 'message', 'state')
  if not record.err and record[1] then
    if record[1] ~= '' then
      redis.call('SET', message_key(id), record[1])
    end
    redis.call('HDEL', job_key(id), 'message')
  end
  local due_ms = KEYS[1] and redis.call('ZSCORE', KEYS[1], id)
  if due_ms then
    redis.call('ZREM', KEYS[1], id)
    if record[2] == 'scheduled' then
      redis.call('ZADD', KEYS[2], due_ms, id)
    end
  end
end
return #ARGV
