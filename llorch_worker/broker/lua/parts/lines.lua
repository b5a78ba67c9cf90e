-- A line: a plain list and its tenants list, which hold all jobs of one queue and priority.

local function new_line(list)
  return {list = list, tenants = tenants_list(list), bell = bell_of(list),
    is_shared = not list:find(WORKER_MARK, 1, true), jobs = 0, tenants_jobs = 0}
end

local function waiting_in(line)
  return line.jobs + line.tenants_jobs
end

-- Set `jobs` of each line to how many wait in the list that its field `which` names. Most lists are empty,
-- which one command finds.
local function count(lines, which, jobs)
  local lists = {}
  for i, line in ipairs(lines) do
    lists[i] = line[which]
  end
  local filled = #lists > 0 and redis.call('EXISTS', unpack(lists)) or 0
  for _, line in ipairs(filled > 0 and lines or {}) do
    line[jobs] = filled > 0 and length(line[which]) or 0
    filled = filled - (line[jobs] > 0 and 1 or 0)
  end
end

-- Count the jobs that wait in each line. Returns the lines with jobs, and how many jobs wait in those that
-- are shared.
local function count_jobs(lines)
  count(lines, 'list', 'jobs')
  count(lines, 'tenants', 'tenants_jobs')
  local filled, shared = {}, 0
  for _, line in ipairs(lines) do
    filled[#filled + 1] = waiting_in(line) > 0 and line or nil
    shared = shared + (line.is_shared and waiting_in(line) or 0)
  end
  return filled, shared
end

-- The list of a line that gives the next job. The plain list's turn comes once each tenant has had its own.
local function next_list(line)
  if line.tenants_jobs == 0 or line.jobs == 0 then
    return line.tenants_jobs > 0 and line.tenants or line.list
  end
  local state = tenants_key(line.tenants)
  if tonumber(redis.call('HGET', state, '*turns') or 0) < redis.call('LLEN', line.tenants) then
    return line.tenants
  end
  redis.call('HSET', state, '*turns', 0)
  return line.list
end

-- Pop the next message of a line from one of its lists; false if there is none.
local function pop(line, list)
  local message = redis.call('RPOP', list)
  local jobs = list == line.list and 'jobs' or 'tenants_jobs'
  line[jobs] = message and line[jobs] - 1 or 0
  return message
end

-- Bring up the next job of the tenant whose job was popped, and forget its turns once the line is empty.
local function bring_up(line, list, job, weights)
  if list == line.tenants and not job.came_back then
    next_of_tenant(list, job.tenant, weights)
  end
  if waiting_in(line) == 0 then
    redis.call('HDEL', tenants_key(line.tenants), '*turns')
  end
end
