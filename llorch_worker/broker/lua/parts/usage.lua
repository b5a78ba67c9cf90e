-- Add what a job used to the counts of the UTC day, by Redis' clock. Only the one end of a job comes here.
-- `usage` is '<who>/<model> <seconds to keep a day> <what>=<amount> ...', or '': see usage.py. Returns its tokens.
local function count_usage(usage)
  local account, keep_s = usage:match('^(%S+) (%d+)')
  local day, tokens = keep_s ~= '0' and usage_key(string.format('%d', now_us() / 86400e6)), 0
  for what, amount in usage:gmatch(' (%l+)=(%d+)') do
    -- Somebody's key of another type must not cost the result.
    if day and redis.pcall('HINCRBY', day, account .. '/' .. what, amount) == tonumber(amount) then
      redis.call('EXPIRE', day, keep_s)
    end
    tokens = tokens + ((what == 'prompt' or what == 'completion') and amount or 0)
  end
  return tokens
end

-- Correct the tokens that admit.lua has `reserved` of a key's rates for a job to those that it used.
local function settle(job_id, reserved, tokens)
  local name, guessed = (reserved or ''):match('^(%S+) (%d+)$')
  for _, rate in ipairs(name and {'tokens_minute', 'tokens_day'} or {}) do
    if redis.pcall('HEXISTS', rates_key(name), rate) == 1 then
      redis.pcall('HINCRBYFLOAT', rates_key(name), rate, tokens - guessed)
    end
  end
  if reserved then
    redis.call('HDEL', job_key(job_id), 'reserved')
  end
end
