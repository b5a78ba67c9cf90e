-- The scripts name keys and channels without the hash tag that all of them begin with in a Redis Cluster:
-- see tagged_names.py. The last of KEYS only makes Redis refuse a script while the slot moves: see
-- scripts.py.

local server, tagged_keys = redis, KEYS
local KEYS = {}
for i = 1, #tagged_keys - 1 do
  KEYS[i] = tagged_keys[i]:sub(#PREFIX + 1)
end

local ONLY_NAMES = {DEL = true, EXISTS = true, RPOPLPUSH = true} -- commands of which all arguments are names

local function with_tag(command, ...)
  local arguments = {...}
  for i = 1, ONLY_NAMES[command] and #arguments or math.min(1, #arguments) do
    arguments[i] = PREFIX .. arguments[i]
  end
  return unpack(arguments)
end

local redis = {
  sha1hex = server.sha1hex,
  call = function(command, ...) return server.call(command, with_tag(command, ...)) end,
  pcall = function(command, ...) return server.pcall(command, with_tag(command, ...)) end,
}
