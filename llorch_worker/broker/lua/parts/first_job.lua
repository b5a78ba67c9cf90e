-- Which job an idempotency key stands for.

-- Whether the end of a job says that the same request may succeed if it is sent again: a retriable error,
-- or a deadline that passed before the first token, which clients of HTTP hear as one.
local function may_be_repeated(job_id)
  local document = redis.pcall('GET', result_key(job_id))
  -- Most ends need not be decoded.
  if type(document) ~= 'string' or not (document:find('"status": "FAILURE"', 1, true)
      or document:find('"finish_reason": "deadline"', 1, true)) then
    return false
  end
  local ok, meta = pcall(cjson.decode, document)
  local result = ok and type(meta) == 'table' and meta.result
  if type(result) ~= 'table' then
    return false
  end
  if meta.status == 'FAILURE' then
    local args = result.exc_message
    -- Other exceptions than ours are read as INTERNAL, which is retriable.
    return type(args) ~= 'table' or #args ~= 4 or args[3] == true
  end
  -- Results of texts have no choices: those words stood in their metadata.
  return meta.status == 'SUCCESS' and result.choices ~= nil
    and result.choices[1].finish_reason == 'deadline' and result.usage.completion == 0
end

-- The job that has this idempotency key, and whether it is known to have been sent with another request than
-- that of the digest `request`; nil if the key is free, also because Redis has lost the job.
local function first_job(key, request)
  local first = redis.call('GET', key)
  if not first or redis.call('EXISTS', job_key(first), result_key(first)) == 0
    or may_be_repeated(first) then
    return nil
  end
  -- A stock producer's job has no digest.
  local before = redis.call('HGET', job_key(first), 'request')
  return first, before and before ~= request
end
