-- Keep the message of a claimed job as a dead letter.
--
-- ARGV[1]  job id
-- ARGV[2]  fence of the claim; one that was lost, or released already, buries nothing
-- ARGV[3]  why it is dead
-- ARGV[4]  the message, UTF-8
-- ARGV[5]  the most dead letters to keep
--
-- Returns 1 if it was buried, else 0.

local job_id, fence, reason, message, most_letters = unpack(ARGV)

local record = redis.call('HMGET', job_key(job_id), 'fence', 'list', 'attempts', 'history')
if record[1] ~= fence or not record[2] then
  return 0
end
bury({id = job_id, reason = reason, message = message, list = record[2],
  attempts = tonumber(record[3]), history = record[4] or ''}, most_letters)
return 1
