-- Journal new events of a job, each once, if the caller's claim still holds.
--
-- Returns 0 if the claim was lost, or earlier entries. Else they are in the stream: 1, and 2 more if a
-- cancel was requested, and 4 more if somebody reads the stream, or is about to.

local job_id = ARGV[1]
local fence = ARGV[2]
local first = ARGV[3] -- number of the first entry
local has_tokens = ARGV[4] == '1'
local events = {unpack(ARGV, 5)} -- JSON documents

-- What is in a pipeline is not sent again: at maxmemory the first write must not grow. See scripts.py.
redis.call('PERSIST', LEASES)
local state, holder, progress, awaited_s = unpack(redis.call('HMGET', job_key(job_id), 'state', 'fence',
  'progress', 'awaited_s'))
if state ~= 'claimed' or holder ~= fence or has_gap(job_id, fence, first) then
  return 0
end
local heard = write_events(redis.call, job_id, first, events)
local is_read = heard > 0 or (awaited_s and now_us() < awaited_s * 1e6)
if has_tokens and progress ~= '1' then
  redis.call('HSET', job_key(job_id), 'progress', 1)
end
return 1 + 2 * redis.call('EXISTS', cancel_key(job_id)) + (is_read and 4 or 0)
