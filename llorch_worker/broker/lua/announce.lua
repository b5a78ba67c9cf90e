-- Note that a worker lives, and write its card.
--
-- KEYS: the model's workers, the worker's card.
--
-- Returns the card before.
--
-- Writes at maxmemory.

local queue = ARGV[1]
local keep_s = ARGV[2]
local is_whole = ARGV[3] == '1' -- whether to write the model's card, which is written without a card before
local card = ARGV[4]
local model, model_card = ARGV[5], ARGV[6] -- gets the time of its first announcement here
local seen_before_ms = ARGV[7] -- how long ago it was seen, as far as others are concerned

redis.call('ZADD', KEYS[1], now_ms() - seen_before_ms, queue)
local before = redis.call('SET', KEYS[2], card, 'EX', keep_s, 'GET')
if is_whole or not before then
  local known = redis.call('HGET', MODELS, model) or ''
  local created = known:match('"created":(%d+)}$') or math.floor(now_ms() / 1000)
  redis.call('HSET', MODELS, model, model_card:sub(1, -2) .. ',"created":' .. created .. '}')
end
return before
