-- The order of the jobs that wait: their scores in the sorted set of their model. The lowest is claimed first.
--
-- A score is class * 2^51 + start tag. Within a class this is start-time fair queueing (Goyal, Vin and Cheng 1996): a
-- job starts at the class's virtual time, or where its tenant's last one finishes, whichever is later; it finishes
-- after its expected tokens divided by the tenant's weight; and the virtual time is the start of the job that was
-- claimed last. So tenants with jobs take turns by tokens. Jobs without a tenant are one more tenant's.
--
-- A tag counts UNITS a token. 2^51 of them are 1.4e14 tokens of one class: at a million a second, four years. From then
-- on its jobs go in the order of their ids. A double holds whole numbers up to 2^53, which three classes do not reach.
-- The virtual time is moved by a unit at each start, so that jobs of many tenants keep their order.
--
-- A job keeps its score: if it comes back, it is before all that were sent after it and its tenant's turn.
--
-- shares_key: a sorted set with the virtual times, by class, and the finishes that are later, by class/tenant. Both
-- are scores. A finish that the virtual time has passed says nothing, and goes. If nothing waits, the virtual time is
-- the latest finish.

local UNITS = 16
local MOST_FINISHES = 64 -- that stay while nothing waits

local function whole(score)
  return string.format('%.0f', score)
end

-- The first and, exclusively, the last score of a class, as Redis takes them.
local function bounds_of(class)
  return whole(class * CLASS), '(' .. whole((class + 1) * CLASS)
end

local function virtual_time(shares, class)
  return tonumber(redis.call('ZSCORE', shares, class) or nil) or class * CLASS
end

-- The score of a job that is sent now. `tokens`: how many it is expected to take.
local function score_at_tail(model, class, tenant, tokens, weight)
  local shares, last = shares_key(model), (class + 1) * CLASS - 1
  local now = virtual_time(shares, class)
  local whose = class .. '/' .. tenant
  local start = math.min(last, math.max(now, tonumber(redis.call('ZSCORE', shares, whose) or nil) or now))
  local finish = math.min(last, start + math.max(1, math.floor(tokens * UNITS / weight)))
  if start == now then
    redis.call('ZADD', shares, whole(now + 1), class, whole(finish), whose)
  else
    redis.call('ZADD', shares, whole(finish), whose)
  end
  return whole(start)
end

-- Move the virtual time on to the start of a job that was claimed.
local function note_start(model, class, score)
  local shares = shares_key(model)
  if score > virtual_time(shares, class) then
    redis.call('ZREMRANGEBYSCORE', shares, class * CLASS, '(' .. whole(score))
    redis.call('ZADD', shares, whole(score), class)
  end
end

-- Forget finishes, because nothing waits.
local function settle_shares(model)
  local shares = shares_key(model)
  for class = HIGH, redis.call('ZCARD', shares) > MOST_FINISHES and LOW or HIGH - 1 do
    local first, last = bounds_of(class)
    local latest = redis.call('ZREVRANGEBYSCORE', shares, last, first, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    redis.call('ZREMRANGEBYSCORE', shares, first, last)
    if latest then
      redis.call('ZADD', shares, latest, class)
    end
  end
end
