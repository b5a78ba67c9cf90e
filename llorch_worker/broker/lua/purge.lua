-- Delete the jobs that wait in KEYS, lists of one queue, and behind them. Returns how many they were.

local jobs = 0
for _, list in ipairs(KEYS) do
  jobs = jobs + redis.call('LLEN', list) + waiting_behind(list)
  if is_tenants_list(list) then
    for _, tenant in ipairs(redis.call('HKEYS', tenants_key(list))) do
      redis.call('DEL', own_list(list, tenant))
    end
    redis.call('DEL', tenants_key(list))
  end
  redis.call('DEL', list)
end
return jobs
