-- Let a job of a gateway's key in, once, if the key's limits allow it, and charge them.
--
-- A rate is a bucket of `limit` units that empties evenly within its window. The tokens of a job are reserved
-- here as somebody guessed them; its end corrects that, see usage.lua.
--
-- KEYS: the sorted set of the key's jobs in flight, the hash of its rates.
--
-- Returns 'admitted', or 'jobs' or 'rate', which keep it out; in how many ms the rates let it in; then for each
-- rate how much is left of it, and the ms until all of it is.

local ROUNDING = 1e-5

local job_id, name = ARGV[1], ARGV[2] -- the key's
local most_jobs = tonumber(ARGV[3]) -- in flight; 0 for any number
local keep_s = ARGV[4] -- for what is known of a key that is no longer used
local enqueue_s = ARGV[5] -- within which the job enters its queue
local tokens = tonumber(ARGV[6])
local rates = {unpack(ARGV, 7)} -- of each its name, its limit and its window in ms
local places, hash, job = KEYS[1], KEYS[2], job_key(job_id)

-- Its sender may not have heard of its admission, or waits for room in the queue.
local reserved, sent, ran = unpack(redis.call('HMGET', job, 'reserved', 'sent', 'state'))
local known = reserved or sent or ran
if reserved and not (sent or ran) then
  redis.call('EXPIRE', job, enqueue_s)
end
local now, used = now_us() / 1000, {}
local state = redis.call('HGETALL', hash)
for i = 1, #state, 2 do
  used[state[i]] = tonumber(state[i + 1])
end
local passed = math.max(0, now - (used.at or now))
local verdict, wait_ms, reserves = 'admitted', 0, false
if most_jobs > 0 and not known and redis.call('ZCARD', places) >= most_jobs
    and not redis.call('ZSCORE', places, job_id) then
  verdict = 'jobs'
end
for i = 1, #rates, 3 do
  local rate, limit, unit_ms = rates[i], rates[i + 1], rates[i + 2] / rates[i + 1]
  local is_of_tokens = rate:find('^tokens')
  local level = math.max(0, (used[rate] or 0) - passed / unit_ms)
  local beyond = level + (is_of_tokens and tokens or 1) - limit
  if beyond > ROUNDING and not known then
    verdict, wait_ms = 'rate', math.max(wait_ms, beyond * unit_ms)
  end
  reserves = reserves or is_of_tokens
  used[rate] = level
end

local admitted = verdict == 'admitted' and not known
local reply, written = {verdict, math.ceil(wait_ms)}, {'at', string.format('%.3f', now)}
for i = 1, #rates, 3 do
  local rate, limit, unit_ms = rates[i], rates[i + 1], rates[i + 2] / rates[i + 1]
  local level = used[rate] + (admitted and (rate:find('^tokens') and tokens or 1) or 0)
  written[#written + 1] = rate
  written[#written + 1] = string.format('%.6f', level)
  reply[#reply + 1] = math.max(0, math.floor(limit - level + ROUNDING))
  reply[#reply + 1] = math.ceil(level * unit_ms)
end
if admitted and most_jobs > 0 then
  redis.call('ZADD', places, now_ms(), job_id)
  redis.call('EXPIRE', places, keep_s)
end
if admitted and #rates > 0 then
  redis.call('DEL', hash) -- with what earlier limits counted
  redis.call('HSET', hash, unpack(written))
  redis.call('EXPIRE', hash, keep_s)
  redis.call('HSET', job, 'reserved', reserves and name .. ' ' .. tokens or '')
  redis.call('EXPIRE', job, enqueue_s)
end
return reply
