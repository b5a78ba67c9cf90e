-- Keep the message of a claimed job as a dead letter.
--
-- Returns 1 if it is buried, 0 if the claim was lost or already released.
--
-- Parts: letters
-- Writes at maxmemory.

local job_id, fence, reason = ARGV[1], ARGV[2], ARGV[3]
local message = ARGV[4] -- UTF-8, or '' for one that is too large
local message_bytes, letters_bytes, most_letters = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local record = redis.call('HMGET', job_key(job_id), 'fence', 'list', 'attempts', 'history')
if record[1] ~= fence or not record[2] then
  return 0
end
bury({id = job_id, reason = reason, message = message, message_bytes = message_bytes, list = record[2],
  attempts = tonumber(record[3]), history = record[4] or ''}, letters_bytes, most_letters)
return 1
