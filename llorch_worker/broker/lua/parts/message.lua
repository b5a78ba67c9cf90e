-- Reading a Celery task message.

-- UTF-8 as Python decodes it: no surrogates, nothing overlong. Python readers fail on other bytes.
local function is_text(bytes)
  if not bytes:find('[\128-\255]') then
    return true
  end
  for _, sequence in ipairs({
    '[\194-\223][\128-\191]',
    '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
    '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
    '\244[\128-\143][\128-\191][\128-\191]',
  }) do
    bytes = bytes:gsub(sequence, ' ')
  end
  return not bytes:find('[\128-\255]')
end

-- The message. If it is not UTF-8, every non-ASCII byte becomes ?.
local function readable(message)
  return is_text(message) and message or (message:gsub('[\128-\255]', '?'))
end

-- Days from 1970-01-01 to a date of the Gregorian calendar.
local function days_of(year, month, day)
  if month <= 2 then
    year, month = year - 1, month + 12
  end
  return 365 * year + math.floor(year / 4) - math.floor(year / 100) + math.floor(year / 400)
    + math.floor((153 * month - 457) / 5) + day - 719469
end

-- Unix time in ms of a time as Python's isoformat() writes it, UTC if it has no offset; nil for
-- other text.
local function unix_ms(text)
  if type(text) ~= 'string' then
    return nil
  end
  local year, month, day, hour, minute, second, rest =
    text:match('^(%d%d%d%d)%-(%d%d)%-(%d%d)[T ](%d%d):(%d%d):(%d%d)(.*)$')
  if not year then
    return nil
  end
  local fraction, zone = rest:match('^(%.?%d*)(.*)$')
  local sign, zone_hours, zone_minutes, zone_seconds = zone:match('^([+-])(%d%d):?(%d%d):?(%d*)$')
  if not sign and zone ~= '' and zone ~= 'Z' then
    return nil
  end
  local offset_s = sign and tonumber(sign .. 1) * (zone_hours * 3600 + zone_minutes * 60
    + (tonumber(zone_seconds) or 0)) or 0
  local days = days_of(tonumber(year), tonumber(month), tonumber(day))
  local seconds = days * 86400 + hour * 3600 + minute * 60 + second - offset_s
  return math.floor(1000 * (seconds + (tonumber('0' .. fraction) or 0)))
end

-- A job with a longer id is buried unread. The worker refuses ids of over 255 characters, and reports that to their
-- producers: for that it must claim them.
local MOST_ID_BYTES = 65536

-- The bytes of Base64 text.
local function from_base64(text)
  local alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'
  local digits = setmetatable({}, {__index = function() return 0 end})
  for i = 1, #alphabet do
    digits[alphabet:sub(i, i)] = i - 1
  end
  return (text:gsub('(.)(.)(.)(.)', function(a, b, c, d)
    local bits = ((digits[a] * 64 + digits[b]) * 64 + digits[c]) * 64 + digits[d]
    local three = string.char(math.floor(bits / 65536), math.floor(bits / 256) % 256, bits % 256)
    return three:sub(1, c == '=' and 1 or d == '=' and 2 or 3)
  end))
end

-- A table from JSON, or nil; whether the text held what no JSON parser but Python's reads.
local function decode_json(text)
  local ok, decoded = pcall(cjson.decode, text)
  local repaired = not ok
  if repaired then
    -- Python's JSON may hold half a surrogate pair. The worker refuses one in a prompt.
    ok, decoded = pcall(cjson.decode, (text:gsub('\\u[dD][89a-fA-F]%x%x', '\\u0000')))
  end
  return ok and type(decoded) == 'table' and decoded or nil, repaired
end

-- Where a message of Celery's first protocol says its id and ETA: in its body. gocelery and celery-php
-- write such messages, some without headers, or with another id as the correlation id.
local function read_body(message, properties)
  local body = type(message.body) == 'string' and message.body or ''
  if properties.body_encoding == 'base64' then
    body = from_base64(body)
  end
  local job, repaired = decode_json(body)
  return job or {}, repaired
end

-- read_message for a message that is not like our client's.
local function decode_message(message)
  local decoded, repaired = decode_json(message)
  if not decoded then
    return nil
  end
  local job = type(decoded.headers) == 'table' and decoded.headers or {}
  local properties = type(decoded.properties) == 'table' and decoded.properties or {}
  if job.id == nil and job.task == nil then
    job, repaired = read_body(decoded, properties)
  end
  local id, eta = job.id, job.eta
  if id == nil then
    id = properties.correlation_id
  end
  if type(id) ~= 'string' or #id == 0 or #id > MOST_ID_BYTES or not is_text(id)
      or repaired and id:find('%z') then
    return nil
  end
  if eta == nil or eta == cjson.null then
    return id, nil
  end
  return id, unix_ms(eta) or false
end

-- The job's id and its ETA, in ms; nil for a message without a usable id. The ETA is nil if there is
-- none, and false if it cannot be read.
local function read_message(message)
  -- Our client's begin so: see message.py. Whoever claims one that is broken further on refuses it.
  local ours = message:match('^{"headers": {"' .. ENQUEUED_AT .. '": [^{}]-"id": "([%w-]+)", "eta": null, ')
  if ours and #ours <= MOST_ID_BYTES then
    return ours
  end
  return decode_message(message)
end
