-- How many jobs wait in KEYS, lists of jobs, and behind them.

local jobs = 0
for _, list in ipairs(KEYS) do
  -- A key of another type must not end a worker that declares its queues.
  jobs = jobs + length_alone(list) + waiting_behind(list)
end
return jobs
