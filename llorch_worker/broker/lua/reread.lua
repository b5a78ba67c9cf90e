-- End the claim of a message that Lua could not read, see parts/message.lua, and put it back as Python reads it, or
-- keep it as a dead letter.
--
-- Returns 1 if the claim was the caller's, else 0.
--
-- Parts: names, wake_ups, letters, message, score, waiting, inbox
-- Writes at maxmemory.

local id, fence = ARGV[1], ARGV[2]
local reread = ARGV[3] -- the message with the job's id, or '' if it names no job
local letter = ARGV[4] -- the message as UTF-8, or ''
local message_bytes, letters_bytes, most_letters = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local list, score = unpack(redis.call('HMGET', job_key(id), 'list', 'score'))
if not is_claimed(id, fence) then
  return 0
end
redis.call('ZREM', LEASES, id)
redis.call('DEL', job_key(id), message_key(id), result_key(id))
if reread ~= '' then
  local job = job_of(reread, list)
  if job.is_new then
    -- It waited among the jobs that generate.
    let_come(job, not job.reads and score or nil)
    if job.reads then
      wake(list, true)
    end
  else
    note_copy(job, reread, list)
  end
else
  bury({id = '', reason = 'malformed', message = letter, message_bytes = message_bytes, list = list,
    attempts = 0, history = ''}, letters_bytes, most_letters)
end
return 1
