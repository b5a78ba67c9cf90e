-- The beginning of a message that waits in a list.

local HEAD_BYTES = 1500 -- they hold the header that our client writes first, and the job's id

-- When the job that the list has at this index was enqueued, in s, and its id, both as text and only if
-- they are there: stock producers write no time.
local function read_head(list, index)
  local head = string.sub(redis.call('LINDEX', list, index), 1, HEAD_BYTES)
  return head:match('"' .. ENQUEUED_AT .. '":%s*(%d+%.?%d*)%s*[,}]'), head:match('"id":%s*"([^"\\]+)"')
end
