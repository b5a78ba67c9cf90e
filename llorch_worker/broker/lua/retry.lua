-- Put a dead letter's job back into its queue with a full set of attempts. It continues from its
-- journal.
--
-- Returns 'retried'; 'gone' (the letter no longer exists); 'under way' (the job already waits or
-- runs); 'ended' (the job succeeded or was cancelled). Only 'retried' changes anything.
--
-- Parts: names, wake_ups, message, letters, score, waiting
-- Writes at maxmemory.

local raw_letter = ARGV[1] -- byte by byte
local call_id = ARGV[2] -- names this call, which is sent again if its reply is lost
local number = ARGV[3] -- the letter's
local letter = cjson.decode(raw_letter)
local job, result, stream = job_key(letter.id), result_key(letter.id), events_key(letter.id)

local state, retried_by, idempotency = unpack(redis.call('HMGET', job, 'state', 'retried_by',
  'idempotency'))
if retried_by == call_id then
  return 'retried'
end
if state and state ~= 'ended' then
  return 'under way'
end
local document = redis.call('GET', result)
if document then
  local ok, meta = pcall(cjson.decode, document)
  if ok and type(meta) == 'table' and meta.status ~= 'FAILURE' then
    return 'ended'
  end
end
if not drop_letter(number) then
  return 'gone'
end
redis.call('DEL', result)

-- Rebuild the stream without its last event. Deleting the entry is not enough: XADD refuses the id
-- of a deleted last entry, and the next attempt writes its first event under that id.
local entries = redis.pcall('XRANGE', stream, '-', '+')
if not entries.err and #entries > 0 then
  local ok, last = pcall(cjson.decode, entries[#entries][2][2])
  if ok and type(last) == 'table' and last.type == 'failed' then
    redis.call('DEL', stream)
    for i = 1, #entries - 1 do
      redis.call('XADD', stream, entries[i][1], unpack(entries[i][2]))
    end
  end
end

redis.call('HSET', job, 'list', letter.list, 'attempts', 0, 'progress', 0,
  'retried_by', call_id, 'retried_ms', string.format('%.0f', now_ms()), 'came_ms', string.format('%.0f', now_ms()),
  'history', letter.history .. string.format('(retried) %.0f\n', now_ms()))
redis.call('HDEL', job, 'strikes', 'deaths', 'buried')
redis.call('ZREM', FOLLOW_UPS, letter.id)
-- The record may have expired, and the journal not: the next claim reads it.
redis.call('HSETNX', job, 'first_claim_ms', string.format('%.0f', now_ms()))
local said = read_message(letter.message) or {}
if type(said[OWNER_HEADER]) == 'string' then
  redis.call('HSETNX', job, 'owner', said[OWNER_HEADER])
end
redis.call('HINCRBY', job, 'fence', 1)
redis.call('PERSIST', job)
redis.call('SET', message_key(letter.id), letter.message)
if idempotency and redis.call('GET', idempotency) == letter.id then
  redis.call('PERSIST', idempotency)
else
  -- It has expired, and may be another job's by now.
  redis.call('HDEL', job, 'idempotency')
end
-- Behind the jobs that already wait.
local tenant = redis.call('HGET', job, 'tenant') or ''
local reads = reads_texts(said)
if reads then
  redis.call('HSET', job, 'reads', 1)
end
let_wait(letter.id, letter.list, (score_at_tail(letter.list, tenant, tokens_of(#letter.message), reads)))
wake(letter.list, reads)
return 'retried'
