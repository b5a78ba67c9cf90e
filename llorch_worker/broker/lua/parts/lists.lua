-- Names of lists, parsed the way queues.py builds them.

-- The shared list for a worker's list: llorch.toy@gpu0.host:high -> llorch.toy:high.
local function shared_list(list)
  return (list:gsub(WORKER_MARK .. '[^' .. SUFFIX_MARKS .. ']*', ''))
end

-- The model's queue: llorch.toy@gpu0.host:high -> llorch.toy.
local function queue_of(list)
  return list:match('^[^' .. WORKER_MARK .. SUFFIX_MARKS .. ']*')
end

-- The list of the model's suspects: llorch.toy:high -> llorch.toy:suspects.
local function suspects_list(list)
  return queue_of(list) .. SUSPECTS_SUFFIX
end

-- The sorted set of the model's jobs with a later ETA: llorch.toy:high -> llorch.toy:scheduled.
local function scheduled_set(list)
  return queue_of(list) .. SCHEDULED_SUFFIX
end

-- Where the tenants of a list take turns: see tenants.lua.
local function tenants_list(list)
  return list .. (list:find(STEP_SEPARATOR, 1, true) and '' or STEP_SEPARATOR) .. TENANTS_MARK
end

-- The loads of the workers that share a place's queue: llorch.toy@gpu0.host -> those of llorch.toy.
local function load_of(place)
  return load_key(place:match('^[^' .. WORKER_MARK .. ']*'))
end

-- Whether jobs can be pushed there: somebody may have written a key of another type at the list's name.
-- Redis takes nothing back when a script fails, so ask before the job's last other trace goes.
local function takes_jobs(list)
  local kind = redis.call('TYPE', list).ok
  return kind == 'none' or kind == 'list'
end
