-- The order of the jobs that wait: their scores in the sorted set of their model. The lowest is claimed first.
--
-- A score is class * 2^51 + start tag, + 2^50 of a job that reads texts: a worker that generates and reads texts claims
-- each kind by itself. Within a class and kind this is start-time fair queueing (Goyal, Vin and Cheng 1996): a
-- job starts at the class's virtual time, or where its tenant's last one finishes, whichever is later; it finishes
-- after its expected tokens divided by the tenant's weight; and the virtual time is the start of the job that was
-- claimed last. So tenants with jobs have fair shares of the tokens. Jobs without a tenant are one more tenant's.
--
-- A tag counts UNITS a token. 2^50 of them are 7e13 tokens of one class: at a million a second, two years. From then
-- on its jobs go in the order of their ids. A double holds whole numbers up to 2^53, which three classes do not reach.
-- The virtual time is moved by a unit at each start, so that jobs of many tenants keep their order.
--
-- A job keeps its score: if it comes back, it is before all whose start tags are later. Only one that has waited for
-- its ETA gets a new one.
--
-- shares_key: a sorted set with the virtual times, by class (1, or 1t of texts), and the finishes that are later, by
-- class/tenant. Both are scores. A finish that the virtual time has passed says nothing. A job that is
-- cancelled, expires or is purged before its first claim is taken off its tenant's finish: one who has nothing left
-- starts with the others again. What he sends then may go before what he had sent behind that job, which keeps its
-- place: so a cancel delays nobody, and costs its tenant at most what he cancelled.

local UNITS = 16
local MOST_FINISHES = 64 -- that stay though they say nothing
local ANSWER_TOKENS = 256 -- that a job makes, as far as anybody knows without its body

local function whole(score)
  return string.format('%.0f', score)
end

local function kind_of(reads)
  return reads and 'texts' or 'generation'
end

-- The first score of a class's jobs that generate, or that read texts.
local function first_score(class, reads)
  return class * CLASS + (reads and TEXTS or 0)
end

-- The first and, exclusively, the last score of a class, as Redis takes them: of its jobs of a kind, or of all.
local function bounds_of(class, kind)
  local last = first_score(class, kind == 'generation') + (kind == 'generation' and 0 or CLASS)
  return whole(first_score(class, kind == 'texts')), '(' .. whole(last)
end

-- What a class's jobs of a kind are called in shares_key and aged_key.
local function share_of(class, reads)
  return class .. (reads and 't' or '')
end

local function virtual_time(shares, class, reads)
  return tonumber(redis.call('ZSCORE', shares, share_of(class, reads)) or nil) or first_score(class, reads)
end

-- How many tokens the job of a message is expected to take, if its producer does not say.
local function tokens_of(message_bytes)
  return message_bytes / 4 + ANSWER_TOKENS
end

-- A tenant's share of a model's workers, as the model's card says it, or 1.
local function weight_of(model, tenant)
  local weights = tenant ~= '' and card_of(model):match('"tenant_weights":"([^"]*)"') or ''
  for name, weight in weights:gmatch('([%w._-]+)=(%d+)') do
    if name == tenant then
      return tonumber(weight)
    end
  end
  return 1
end

-- The score of a job that is sent now, and what its tenant is charged for it. `list`: its own; `tokens`: how many it is
-- expected to take; `reads`: whether it reads texts; `starts`: whether it is claimed at once.
local function score_at_tail(list, tenant, tokens, reads, starts)
  local model, class = model_of(list), class_of(list)
  local shares, share = shares_key(model), share_of(class, reads)
  local last = first_score(class, reads) + TEXTS - 1
  local whose = share .. '/' .. tenant
  local now, finished = unpack(redis.call('ZMSCORE', shares, share, whose))
  now = tonumber(now or nil) or first_score(class, reads)
  local start = math.min(last, math.max(now, tonumber(finished or nil) or now))
  local finish = math.min(last, start + math.max(1, math.floor(tokens * UNITS / weight_of(model, tenant))))
  local cost = whole(finish - start)
  now = starts and start or start == now and now + 1 or now
  redis.call('ZADD', shares, whole(now), share, whole(finish), whose)
  return whole(start), cost
end

-- Note that a job which was never claimed waits no more, so that its tenant is not charged for it.
local function refund(model, class, tenant, cost, reads)
  local shares, share = shares_key(model), share_of(class, reads)
  local whose = share .. '/' .. tenant
  local now, finished = unpack(redis.call('ZMSCORE', shares, share, whose))
  if now and finished and tonumber(finished) > tonumber(now) then
    redis.call('ZADD', shares, whole(math.max(now, finished - cost)), whose)
  end
end

-- Move the virtual time on to the start of a job that was claimed.
local function note_start(model, class, score)
  redis.call('ZADD', shares_key(model), 'GT', whole(score), share_of(class, score >= first_score(class, true)))
end

-- Forget the finishes that say nothing any more. If nothing waits, the virtual time becomes the latest finish.
local function forget_finishes(model)
  local shares = shares_key(model)
  if redis.call('ZCARD', shares) <= MOST_FINISHES then
    return
  end
  local is_over = redis.call('EXISTS', waiting_key(model)) == 0
  for place = 0, 2 * LOW + 1 do
    local class, reads = math.floor(place / 2), place % 2 == 1
    local first, last = bounds_of(class, kind_of(reads))
    local latest = is_over and redis.call('ZREVRANGEBYSCORE', shares, last, first, 'LIMIT', 0, 1)[1]
    local now = redis.call('ZSCORE', shares, latest or share_of(class, reads))
    if now then
      redis.call('ZREMRANGEBYSCORE', shares, first, whole(now))
      redis.call('ZADD', shares, whole(now), share_of(class, reads))
    end
  end
end
