-- Affinity: preferring a worker that may have the beginning of a job's prompt in its KV cache. See
-- fleet/affinity.py.
--
-- A place is a worker's name in the registry. A placed job waits like any other, and any worker may take it; its
-- record names the place.

local LOAD_BOUND = 2 -- a place may have this many times the jobs of the least loaded one
local WINDOW = 16 -- how many of the first jobs of a class a worker looks through for its own
-- A job overtakes only those that came at most this long before it, so none is overtaken for ever.
local OVERTAKE_MS = 2000

-- The loads of the workers of a place's model: llorch.toy@gpu0.host -> those of llorch.toy.
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

-- The jobs of a page in their order, but of the first ones those that prefer this worker before the others.
local function own_first(jobs, place)
  local own, others = {}, {}
  for i, job in ipairs(jobs) do
    job.record = i <= WINDOW and read_record(job.id)
    local is_own = job.record and job.record.prefers == place
      and job.record.since_ms <= jobs[1].record.since_ms + OVERTAKE_MS
    table.insert(is_own and own or others, job)
  end
  for _, job in ipairs(others) do
    own[#own + 1] = job
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
