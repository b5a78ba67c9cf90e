-- Add what a job used to the counts of the UTC day, by Redis' clock. Only the one end of a job comes here.
-- `usage` is '<who>/<model> <seconds to keep a day> <what>=<amount> ...', or '': see usage.py.
local function count_usage(usage)
  local account, keep_s = usage:match('^(%S+) (%d+)')
  local day = account and usage_key(string.format('%d', now_us() / 86400e6))
  for what, amount in usage:gmatch(' (%l+)=(%d+)') do
    -- Somebody's key of another type must not cost the result.
    if redis.pcall('HINCRBY', day, account .. '/' .. what, amount) == tonumber(amount) then
      redis.call('EXPIRE', day, keep_s)
    end
  end
end
