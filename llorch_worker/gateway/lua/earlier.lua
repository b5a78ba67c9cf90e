-- Look for the job that has an idempotency key.
--
-- KEYS: the idempotency key.
--
-- Returns {'known', its id}, {'other', its id} if it was sent with another request, or nothing if the key is
-- free.
--
-- Parts: first_job

local first, differs = first_job(KEYS[1], ARGV[1]) -- a digest of the request
return first and {differs and 'other' or 'known', first}
