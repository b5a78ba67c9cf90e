-- How many of the messages that a queue's consumer would take first are jobs of ours: a producer forgot
-- `queue=`, or gave it the model's name. ARGV: its lists that hold something. No message leaves Redis.

local LOOKED_AT = 100 -- in each list: messages may be as long as prompts

local jobs = 0
for _, list in ipairs(ARGV) do
  local is_list = redis.pcall('TYPE', list).ok == 'list' -- an error: this user may not read it
  for place = 1, is_list and math.min(LOOKED_AT, redis.call('LLEN', list)) or 0 do
    local task = redis.call('LINDEX', list, -place):match(TASK_HEADER)
    if task and TASKS:find(' ' .. task .. ' ', 1, true) then
      jobs = jobs + 1
    end
  end
end
return jobs
