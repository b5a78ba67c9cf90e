-- Names of lists and what they say, parsed the way queues.py builds them. A job's list says its model and its
-- priority, also while the job is in no list.

-- The model's queue: llorch.toy:high -> llorch.toy.
local function queue_of(list)
  return list:match('^[^' .. SUFFIX_MARKS .. ']*')
end

local function model_of(list)
  return queue_of(list):sub(#QUEUE_PREFIX + 1)
end

local HIGH, NORMAL, LOW = 0, 1, 2

-- The class of a list's jobs. A claim takes all of a lower number first, but for the rule of age: see claim.lua.
local function class_of(list)
  return list:sub(-#HIGH_SUFFIX) == HIGH_SUFFIX and HIGH or list:sub(-#LOW_SUFFIX) == LOW_SUFFIX and LOW or NORMAL
end

-- The card of a model as JSON, or ''. Read once.
local cards = {}
local function card_of(model)
  if not cards[model] then
    local card = redis.pcall('HGET', MODELS, model)
    cards[model] = type(card) == 'string' and card or ''
  end
  return cards[model]
end
