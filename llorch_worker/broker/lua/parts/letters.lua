-- Dead letters: JSON by number, and a list of '<number> <bytes> <owner>', newest first.
--
-- Their bytes are bounded in all and for each owner: the gateway's key that sent the job, else its tenant; all
-- others count as one. So nobody's letters push out what another keeps within his share.

local SHARES = 4 -- an owner has at most one of so many

local function owner_of(id)
  local owner, tenant = unpack(id ~= '' and redis.call('HMGET', job_key(id), 'owner', 'tenant') or {})
  return owner and owner ~= '' and 'key ' .. owner or tenant and tenant ~= '' and 'tenant ' .. tenant or ''
end

-- Count a letter as one more of its owner's, or with `sign` -1 as one less.
local function count_letter(entry, sign)
  local bytes, owner = entry:match('^%d+ (%d+) (.*)$')
  if redis.call('HINCRBY', LETTERS_HELD, 'letters ' .. owner, sign) > 0 then
    redis.call('HINCRBY', LETTERS_HELD, 'bytes ' .. owner, sign * bytes)
  else
    redis.call('HDEL', LETTERS_HELD, 'letters ' .. owner, 'bytes ' .. owner)
  end
end

local function drop_entry(entry)
  redis.call('LREM', DEAD_LETTERS, -1, entry)
  count_letter(entry, -1)
  return redis.call('HDEL', LETTERS, entry:match('^%d+')) == 1
end

-- Delete a letter; false if there is none of this number.
local function drop_letter(number)
  for _, entry in ipairs(redis.call('LRANGE', DEAD_LETTERS, 0, -1)) do
    if entry:match('^%d+') == number then
      return drop_entry(entry)
    end
  end
  return false
end

local LOOKED_AT = 100

local function drop_oldest_of(owner)
  for from = redis.call('LLEN', DEAD_LETTERS), 1, -LOOKED_AT do
    local entries = redis.call('LRANGE', DEAD_LETTERS, math.max(0, from - LOOKED_AT), from - 1)
    for i = #entries, 1, -1 do
      if entries[i]:match('^%d+ %d+ (.*)$') == owner then
        return drop_entry(entries[i])
      end
    end
  end
  -- Somebody has deleted entries of the list.
  redis.call('HDEL', LETTERS_HELD, 'letters ' .. owner, 'bytes ' .. owner)
end

-- The owner with most of a unit, if he has more than his share, or all have more than `most`.
local function owner_above(unit, most)
  local held, largest, total = redis.call('HGETALL', LETTERS_HELD), nil, 0
  local largest_held = 0
  for i = 1, #held, 2 do
    local of, owner = held[i]:match('^(%l+) (.*)$')
    local count = of == unit and tonumber(held[i + 1]) or 0
    total = total + count
    if count > largest_held then
      largest, largest_held = owner, count
    end
  end
  return (total > most or largest_held > most / SHARES) and largest
end

-- Delete the oldest letters of those who have most, until all are within the bounds.
local function make_room(most_bytes, most_letters)
  while true do
    local owner = owner_above('bytes', most_bytes) or owner_above('letters', most_letters)
    if not owner then
      return
    end
    drop_oldest_of(owner)
  end
end

-- Keep a dead letter: {id, reason, message, message_bytes, list, attempts, history}; id is '' if the message
-- names no job, and the message must be UTF-8. A job is buried once: a reply may be lost and the call sent
-- again, and a worker that dies before it ends the claim leaves the message to the next one.
local function bury(letter, most_bytes, most_letters)
  letter.at_ms = now_ms()
  local number = now_us()
  while redis.call('HEXISTS', LETTERS, string.format('%d', number)) == 1 do
    number = number + 1
  end
  number = string.format('%d', number)
  if letter.id ~= '' and redis.call('HSETNX', job_key(letter.id), 'buried', number) == 0 then
    return
  end
  local share = most_bytes / SHARES
  local message, json = letter.message, nil
  if #message <= share then
    json = cjson.encode(letter)
  end
  if not json or #json > share then
    -- The message is larger than its owner's share: no room can be made for it.
    letter.message = ''
    json = cjson.encode(letter)
  end
  local entry = number .. ' ' .. #json .. ' ' .. owner_of(letter.id)
  if redis.call('LPUSH', DEAD_LETTERS, entry) == 1 then
    -- Somebody may have deleted the list alone.
    redis.call('DEL', LETTERS, LETTERS_HELD)
  end
  redis.call('HSET', LETTERS, number, json)
  count_letter(entry, 1)
  make_room(most_bytes, most_letters)
end
