-- What waits for the workers of a model.
--
-- KEYS: the model's inbox lists.
--
-- Returns JSON: `now_ms`; `classes`, for each its jobs, in the set and in the inbox, and since when its next job waits
-- in ms, or 0 if nobody knows; `scheduled`; `suspects`, among the first jobs of each class; and `wrong`, pairs of an
-- inbox list at whose name somebody has written a key of another type, and that type.
--
-- Parts: names, message, score, waiting, inbox

local MOST_LOOKED = 100

local model = ARGV[1]
local classes, wrong, suspects = {}, {}, 0
for _, class in ipairs({HIGH, NORMAL, LOW}) do
  local first, last = bounds_of(class)
  local found = {jobs = redis.call('ZCOUNT', waiting_key(model), first, last), since_ms = 0}
  for i, id in ipairs(found.jobs > 0 and redis.call('ZRANGEBYSCORE', waiting_key(model), first, last, 'LIMIT', 0,
      MOST_LOOKED) or {}) do
    local job = read_record(id)
    suspects = suspects + (job.strikes and job.progress ~= '1' and 1 or 0)
    found.since_ms = i == 1 and job.since_ms or found.since_ms
  end
  classes[#classes + 1] = found
end
for _, list in ipairs(redis.call('EXISTS', unpack(KEYS)) > 0 and KEYS or {}) do
  local jobs = redis.pcall('LLEN', list)
  if type(jobs) == 'number' then
    local found = classes[class_of(list_of_priority(list)) + 1]
    found.jobs = found.jobs + jobs
  else
    wrong[#wrong + 1] = {list, redis.pcall('TYPE', list).ok or 'value'}
  end
end
return cjson.encode({now_ms = now_ms(), classes = classes, suspects = suspects,
  scheduled = redis.call('ZCARD', scheduled_key(model)), wrong = #wrong > 0 and wrong or nil})
