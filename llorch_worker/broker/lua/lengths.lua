-- How many jobs wait in KEYS, lists of jobs, and behind them.

local jobs = 0
for _, list in ipairs(KEYS) do
  jobs = jobs + redis.call('LLEN', list) + waiting_behind(list)
end
return jobs
