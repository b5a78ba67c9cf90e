-- Dead letters without their messages, the newest first.
--
-- Returns how many there are; a text that differs whenever their list has changed; and letters from
-- place `first` on, each {id, reason, list, attempts, history, ms of its death, bytes of its message,
-- the whole letter if its id was asked for, otherwise ''}. They are at most `most`, and few enough not
-- to keep Redis busy; the next call goes on with the rest.

local first, most = tonumber(ARGV[1]), tonumber(ARGV[2])
-- Redis answers nobody while it parses messages, which may be as long as prompts.
local MOST_BYTES = 2^20
local TYPES = {id = 'string', reason = 'string', list = 'string', attempts = 'number',
  history = 'string', at_ms = 'number', message = 'string'}

-- What nobody can read as a letter is one whose whole message is malformed, as in dead_letters.py.
local function read(raw)
  local ok, letter = pcall(cjson.decode, raw)
  for name, known in pairs(TYPES) do
    if not ok or type(letter) ~= 'table' or type(letter[name]) ~= known then
      return {id = '', reason = 'malformed', list = '', attempts = 0, history = '', at_ms = 0,
        message = raw}
    end
  end
  return letter
end

local whole = {}
for i = 3, #ARGV do
  whole[ARGV[i]] = true
end

-- A new letter changes the head, and one that goes the length.
local newest = redis.call('LINDEX', DEAD_LETTERS, 0)
local total = redis.call('LLEN', DEAD_LETTERS)
local version = total .. ' ' .. redis.sha1hex(newest or '')

local found, bytes = {}, 0
while #found < most and bytes < MOST_BYTES do
  local raw = redis.call('LINDEX', DEAD_LETTERS, first + #found)
  if not raw then
    break
  end
  bytes = bytes + #raw
  local letter = read(raw)
  local id = letter.id ~= '' and letter.id or 'malformed-' .. redis.sha1hex(raw):sub(1, 12)
  found[#found + 1] = {id, letter.reason, letter.list, letter.attempts, letter.history, letter.at_ms,
    #letter.message, whole[id] and raw or ''}
end
return {total, version, found}
