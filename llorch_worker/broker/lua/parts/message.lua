-- Reading a Celery task message.

-- A job with a longer id is not read. Workers refuse ids of over 255 characters, and must claim the jobs to tell
-- their producers.
local MOST_ID_BYTES = 65536

local function headers_of(json)
  local ok, envelope = pcall(cjson.decode, json)
  return ok and type(envelope) == 'table' and type(envelope.headers) == 'table' and envelope.headers
end

-- The message without what is in its body, which kombu writes in front of the headers: decoding 32 MB would take
-- Redis half a second.
local function without_body(message)
  local _, start = message:find('"body": "', 1, true)
  local stop = start and message:find('"', start + 1, true)
  local escape = stop and message:find('\\', start + 1, true)
  if not stop or escape and escape < stop then
    return message
  end
  return message:sub(1, start) .. message:sub(stop)
end

-- The headers of a message; nil if they name no job, as those of Celery's first protocol, or cjson cannot read them.
-- Python puts such a message back with the job's id: see message.py.
local function read_message(message)
  -- Our client writes the body, which may be long, behind the headers.
  local body = message:find(', "body": "', 1, true)
  local headers = body and headers_of(message:sub(1, body - 1) .. '}') or headers_of(without_body(message))
  local id = headers and headers.id
  if type(id) ~= 'string' or #id == 0 or #id > MOST_ID_BYTES then
    return nil
  end
  -- cjson also reads bytes that are not UTF-8. What it makes of escaped characters is.
  return not (id:find('[\128-\255]') and message:find('[\128-\255]')) and headers or nil
end

-- Whether these headers are of a task that reads texts, and generates none.
local function reads_texts(headers)
  return type(headers.task) == 'string' and TEXT_TASKS:find(' ' .. headers.task .. ' ', 1, true) ~= nil
end

-- What a claim returns of a message; false for one that is large: the caller reads it after the claim.
local function brief(message)
  return #message <= APART_BYTES and message
end

-- The `brief` message of a job; nil if somebody has deleted it.
local function message_of(id)
  local message = redis.call('GETRANGE', message_key(id), 0, APART_BYTES)
  if message == '' and redis.call('EXISTS', message_key(id)) == 0 then
    return nil
  end
  return brief(message)
end
