-- Placement: preferring a worker that may have the beginning of a job's prompt in its KV cache. See
-- placement.py.
--
-- A place is a worker queue's name. A placed job waits in the shared list like any other, and any
-- worker may take it; its message names the place, after the time of its enqueueing.

local LOAD_BOUND = 2 -- a place may have this many times the jobs of the least loaded one
local WINDOW = 16 -- how many of the first jobs of a list a worker looks through for its own
-- A job overtakes only those that were enqueued at most this long before it, so none is overtaken for
-- ever.
local OVERTAKE_S = 2

-- The first of the `candidates` that has at most LOAD_BOUND times the jobs of the least loaded worker
-- with room, so none that is busy while another is idle; else the least loaded one; nil if no
-- worker is known to have room.
local function choose_place(candidates)
  local load = load_of(candidates[1])
  local least, jobs_there = unpack(redis.call('ZRANGE', load, 0, 0, 'WITHSCORES'))
  if not least then
    return nil
  end
  local most = LOAD_BOUND * math.max(0, jobs_there)
  for _, place in ipairs(candidates) do
    local jobs = redis.call('ZSCORE', load, place)
    if jobs and tonumber(jobs) <= most then
      return place
    end
  end
  return least
end

-- What follows the time in the message of a placed job.
local function place_header(place)
  return ', "' .. PLACE .. '": "' .. place .. '"'
end

-- When our client enqueued the job, in s, and its place; nil without.
local TIME_PATTERN = '^{"headers": {"' .. ENQUEUED_AT .. '": (%d+%.%d+)'
local PLACE_PATTERN = TIME_PATTERN .. place_header('([^"]*)')
local function read_place(message)
  local time, place = message:match(PLACE_PATTERN)
  return tonumber(time or message:match(TIME_PATTERN)), place
end

-- Move up to `most` jobs that are placed with this worker to the head of the list, the earliest in
-- front. Returns the bytes that were read.
local function bring_forward(list, place, most)
  local first_jobs = redis.call('LRANGE', list, -WINDOW, -1) -- the head is last
  local bytes, last_s, found = 0, nil, {}
  for i = #first_jobs, 1, -1 do
    bytes = bytes + #first_jobs[i]
    local time, placed = read_place(first_jobs[i])
    last_s = last_s or math.min(time or 0, now_ms() / 1000) + OVERTAKE_S
    if placed == place and time <= last_s and #found < most then
      found[#found + 1] = i
    end
  end
  local in_front = #found == 0 or found[#found] == #first_jobs + 1 - #found
  for n = in_front and 0 or #found, 1, -1 do
    local message = first_jobs[found[n]]
    redis.call('LREM', list, -1, message)
    redis.call('RPUSH', list, message)
  end
  return bytes
end

-- Record how many jobs a worker has, if it has room for more.
local function note_load(place, jobs, has_room)
  if has_room then
    redis.call('ZADD', load_of(place), jobs, place)
  else
    redis.call('ZREM', load_of(place), place)
  end
end
