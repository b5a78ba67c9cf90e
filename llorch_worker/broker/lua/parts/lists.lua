-- Names of lists, parsed the way queues.py builds them.

-- The shared list for a worker's list: llorch.toy@gpu0.host:high -> llorch.toy:high.
local function shared_list(list)
  return (list:gsub(WORKER_MARK .. '[^' .. SUFFIX_MARKS .. ']*', ''))
end

-- The list of the model's suspects: llorch.toy:high -> llorch.toy:suspects.
local function suspects_list(list)
  return list:match('^[^' .. WORKER_MARK .. SUFFIX_MARKS .. ']*') .. SUSPECTS_SUFFIX
end

-- The sorted set of the model's jobs with a later ETA: llorch.toy:high -> llorch.toy:scheduled.
local function scheduled_set(list)
  return list:match('^[^' .. WORKER_MARK .. SUFFIX_MARKS .. ']*') .. SCHEDULED_SUFFIX
end

-- Add the lists for each step of priority, and for the tenants of a step, behind those of the queues' names.
local function add_steps(lists) -- rare
  local queues = #lists
  for step in LOWER_STEPS:gmatch('[^,]+') do
    for i = 1, queues do
      lists[#lists + 1] = lists[i] .. step
    end
  end
end
