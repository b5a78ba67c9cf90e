-- How many jobs wait in KEYS, lists of jobs, and behind them.

local jobs = 0
for _, list in ipairs(KEYS) do
  local own = redis.pcall('LLEN', list)
  -- A key of another type holds no jobs, and must not end a worker that declares its queues.
  jobs = jobs + (type(own) == 'number' and own or 0) + waiting_behind(list)
end
return jobs
