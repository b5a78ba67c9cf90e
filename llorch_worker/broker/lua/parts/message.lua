-- Reading a Celery task message.

-- UTF-8 as Python decodes it: no surrogates, nothing overlong. Python readers fail on other bytes.
local SEQUENCES = {
  '[\194-\223][\128-\191]',
  '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
  '\244[\128-\143][\128-\191][\128-\191]',
}
local function is_text(bytes)
  if not bytes:find('[\128-\255]') then
    return true
  end
  for _, sequence in ipairs(SEQUENCES) do
    bytes = bytes:gsub(sequence, ' ')
  end
  return not bytes:find('[\128-\255]')
end

-- The message. If it is not UTF-8, every non-ASCII byte becomes ?.
local function readable(message)
  return is_text(message) and message or (message:gsub('[\128-\255]', '?'))
end

-- The job's id, and whether the job waits for an ETA; nil for a message without a usable id.
local function read_message(message)
  local ok, decoded = pcall(cjson.decode, message)
  local repaired = not ok
  if repaired then
    -- Python's JSON may hold half a surrogate pair. The worker refuses one in a prompt.
    ok, decoded = pcall(cjson.decode, (message:gsub('\\u[dD][89a-fA-F]%x%x', '\\u0000')))
  end
  if not ok or type(decoded) ~= 'table' or type(decoded.headers) ~= 'table' then
    return nil
  end
  local id = decoded.headers.id
  if id == nil and type(decoded.properties) == 'table' then
    -- Celery's first message protocol
    id = decoded.properties.correlation_id
  end
  if type(id) ~= 'string' or #id == 0 or #id > 255 or not is_text(id)
      or repaired and id:find('%z') then
    return nil
  end
  local eta = decoded.headers.eta
  return id, eta ~= nil and eta ~= cjson.null
end
