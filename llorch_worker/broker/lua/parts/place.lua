-- Placement: preferring a worker that may have the beginning of a job's prompt in its KV cache. See
-- placement.py.
--
-- A place is a worker's name in the registry. A placed job waits like any other, and any worker may take it; its
-- record names the place.

local LOAD_BOUND = 2 -- a place may have this many times the jobs of the least loaded one
local WINDOW = 16 -- how many of the first jobs of a class a worker looks through for its own
-- A job overtakes only those that came at most this long before it, so none is overtaken for ever.
local OVERTAKE_MS = 2000

-- The loads of the workers that share a place's queue: llorch.toy@gpu0.host -> those of llorch.toy.
local function load_of(place)
  return load_key(place:match('^[^' .. WORKER_MARK .. ']*'))
end

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

-- The jobs in their order, but those that prefer this worker first.
local function own_first(records, place)
  local own, others, last_ms = {}, {}, nil
  for i, found in ipairs(records) do
    if i <= WINDOW then
      local prefers, sent, came_ms, eta_ms = unpack(redis.pcall('HMGET', job_key(found.id), 'prefers', 'sent', 'came_ms',
        'eta_ms'))
      local since_ms = math.max(tonumber(eta_ms or 0), tonumber(came_ms or nil) or 1000 * tonumber(sent or 0))
      last_ms = last_ms or since_ms + OVERTAKE_MS
      found.is_own = prefers == place and since_ms <= last_ms
    end
    table.insert(found.is_own and own or others, found)
  end
  for _, found in ipairs(others) do
    own[#own + 1] = found
  end
  return own
end

-- Record how many jobs a worker has, if it has room for more.
local function note_load(place, jobs, has_room)
  if has_room then
    redis.call('ZADD', load_of(place), jobs, place)
  else
    redis.call('ZREM', load_of(place), place)
  end
end
