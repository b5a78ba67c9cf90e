-- Note that a worker lives, and write its card.
--
-- KEYS: the model's workers, the worker's card, and the contexts with which the model is served.
--
-- Returns the card before.
--
-- Parts: names, score
-- Writes at maxmemory.

local queue = ARGV[1]
local keep_s = ARGV[2]
local is_whole = ARGV[3] == '1' -- whether to write the model's card, which is written without a card before
local card = ARGV[4]
local model, model_card = ARGV[5], ARGV[6] -- gets the time of its first announcement here
local seen_before_ms = ARGV[7] -- how long ago it was seen, as far as others are concerned
local forgotten_ms, most_workers = ARGV[8], ARGV[9] -- after what time, and beyond how many, workers are forgotten
local max_context = ARGV[10]

redis.call('ZADD', KEYS[1], now_ms() - seen_before_ms, queue)
local before = redis.call('SET', KEYS[2], card, 'EX', keep_s, 'GET')
if is_whole or not before then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms() - forgotten_ms)
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms() - forgotten_ms)
  redis.call('ZADD', KEYS[3], now_ms(), max_context)
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - most_workers)
  forget_finishes(model)
  local known = redis.call('HGET', MODELS, model) or ''
  local created = known:match('"created":(%d+)}$') or math.floor(now_ms() / 1000)
  redis.call('HSET', MODELS, model, model_card:sub(1, -2) .. ',"created":' .. created .. '}')
end
return before
