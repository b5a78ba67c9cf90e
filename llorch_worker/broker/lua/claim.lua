-- Take jobs from the queue: pop, count the attempt and register the lease in one step.
--
-- A worker that dies after this script leaves a lease that lapses; one that dies before it leaves
-- the message in its list. There is no state between.
--
-- A suspect is a job that may be what killed its worker: see sweep.lua. It waits in a list of its
-- own, and runs where no job is that already lost a worker.
--
-- KEYS[1]    llorch:leases      zset  job id -> when its lease ends, ms of Redis' own clock
-- KEYS[2]    llorch:dead        list  dead letters, newest first
-- KEYS[3]    llorch.<model>:suspects  list
-- KEYS[4..]  the queue's lists, the most urgent first (kombu pushes left, so the head is right)
-- ARGV[1]    lease, ms
-- ARGV[2]    the most attempts of a job
-- ARGV[3]    the most jobs to take
-- ARGV[4]    who claims
-- ARGV[5]    seconds that the record of an ended job is kept
-- ARGV[6]    id of the suspect that the caller holds, or ''
-- ARGV[7]    result of a job without attempts left, a template with @ID@
-- ARGV[8]    its last event
-- ARGV[9]    seconds that an event stream is kept
-- ARGV[10]   the most dead letters to keep
-- ARGV[11]   state of a job that is claimed, a template with @ID@
-- ARGV[12..] ids of the jobs that the caller holds and that already lost a worker
-- Touches    llorch:job:<id>    hash  state, message, list, attempts, fence, worker, history, ...
--            llorch:job:<id>:events of jobs without attempts left
--            celery-task-meta-<id> of those, and of jobs that begin now
-- Reads      llorch:job:<id>:cancel
--
-- The pop comes first: a server at maxmemory refuses scripts that begin with a write that grows,
-- and jobs must go on there, because their ends are what makes room.
--
-- A worker claims what it has room for, so a job begins with its claim and is STARTED from here on; but
-- not one with an ETA, which is only held until its time.
--
-- Returns a flat list, which Redis sends in one piece: how many jobs were taken; for each of them id,
-- message, attempts, fence, list, 1 if it is a suspect, ms of its first claim, ms of this, 1 if nobody
-- claimed it before, 1 if a cancel was asked for; how many of the entries that became dead letters are
-- told here, and how many more did, with how many bytes; and for each of the former its id, or '' where
-- it names no job, and its bytes. One claim may bury a whole queue of junk, and somebody logs this.

local leases, dead, suspects = KEYS[1], KEYS[2], KEYS[3]
local lease_ms, max_attempts, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local worker, keep_s, stream_s = ARGV[4], ARGV[5], ARGV[9]

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local taken = {}
local MOST_TOLD = 10
local buried, untold, untold_bytes = {}, 0, 0
local redelivered = {}
for i = 12, #ARGV do
  redelivered[#redelivered + 1] = ARGV[i]
end
local redelivered_before = #redelivered

-- UTF-8 as Python decodes it: no surrogates, nothing overlong. What is not would stop every reader.
local SEQUENCES = {
  '[\194-\223][\128-\191]',
  '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
  '\244[\128-\143][\128-\191][\128-\191]',
}
local function is_text(bytes)
  if not bytes:find('[\128-\255]') then
    return true
  end
  for _, sequence in ipairs(SEQUENCES) do
    bytes = bytes:gsub(sequence, ' ')
  end
  return not bytes:find('[\128-\255]')
end

-- The job's id, and whether it waits for an ETA; nil where the message has none.
local function read(message)
  local ok, decoded = pcall(cjson.decode, message)
  local mended = not ok
  if mended then
    -- Half a character, which Python's JSON may hold: in a prompt, that the worker refuses by name.
    ok, decoded = pcall(cjson.decode, (message:gsub('\\u[dD][89a-fA-F]%x%x', '\\u0000')))
  end
  if not ok or type(decoded) ~= 'table' or type(decoded.headers) ~= 'table' then
    return nil
  end
  local id = decoded.headers.id
  if id == nil and type(decoded.properties) == 'table' then
    -- Celery's first message protocol
    id = decoded.properties.correlation_id
  end
  if type(id) ~= 'string' or #id == 0 or #id > 255 or not is_text(id)
      or mended and id:find('%z') then
    return nil
  end
  local eta = decoded.headers.eta
  return id, eta ~= nil and eta ~= cjson.null
end

-- A template as the document of one job.
local function document_of(template, id)
  local id_json = cjson.encode(id):sub(2, -2):gsub('%%', '%%%%')
  local document = template:gsub('@ID@', id_json)
  return document
end

local function store(id, document)
  local result = 'celery-task-meta-' .. id
  redis.call('SET', result, document, 'EX', keep_s)
  -- As Celery's own backend does: it wakes AsyncResult.get().
  redis.call('PUBLISH', result, document)
end

local function bury(id, reason, message, list, attempts, history)
  if #buried < MOST_TOLD then
    buried[#buried + 1] = {id, #message}
  else
    untold, untold_bytes = untold + 1, untold_bytes + #message
  end
  if not is_text(message) then
    message = message:gsub('[\128-\255]', '?')
  end
  redis.call('LPUSH', dead, cjson.encode({
    id = id, reason = reason, message = message, list = list,
    attempts = attempts, history = history, at_ms = now_ms,
  }))
  redis.call('LTRIM', dead, 0, ARGV[10] - 1)
end

local function exhaust(id, message, list, attempts, history)
  bury(id, 'attempts exhausted', message, list, attempts, history)
  redis.call('HSET', 'llorch:job:' .. id, 'state', 'ended')
  redis.call('EXPIRE', 'llorch:job:' .. id, keep_s)
  store(id, document_of(ARGV[7], id))
  local events = 'llorch:job:' .. id .. ':events'
  -- Protected, as below: an error here would lose all that this script popped.
  local entries = redis.pcall('XREVRANGE', events, '+', '-', 'COUNT', 1)
  if not entries.err then
    local number = (entries[1] and tonumber(entries[1][1]:match('^%d+')) or 0) + 1
    redis.pcall('XADD', events, string.format('%d-0', number), 'event', ARGV[8])
    redis.call('EXPIRE', events, stream_s)
  end
end

-- Returns false where the job must stay in its list for now.
local function take(message, list, from_suspects, may_be_redelivered)
  local id, waits = read(message)
  if not id then
    bury('', 'malformed', message, list, 0, '')
    return true
  end
  local job = 'llorch:job:' .. id
  local record = redis.pcall('HMGET', job, 'state', 'attempts', 'history', 'list', 'fence')
  if record.err then
    -- An id made so that its record would be another of our keys.
    bury('', 'malformed', message, list, 0, '')
    return true
  end
  local state, attempts, history = record[1], tonumber(record[2] or '0'), record[3] or ''
  if state == 'claimed' or state == 'ended' then
    -- The same job delivered twice: whoever came first goes on, this copy yields.
    redis.call('HINCRBY', job, 'duplicates', 1)
    return true
  end
  list = from_suspects and record[4] or list
  -- A worker's own queue: the address holds until here. Whatever becomes of this claim, what comes
  -- back from it is for every worker of the model.
  list = list:gsub('@[^:\6]*', '')
  if attempts >= max_attempts then
    exhaust(id, message, list, attempts, history)
    return true
  end
  if attempts > 0 and not may_be_redelivered then
    return false
  end
  attempts = attempts + 1
  -- Of the clock, not counted from 1: a claim that a failover forgot must not share its fence with the
  -- next one.
  local fence = string.format('%.0f',
    math.max(tonumber(record[5] or '0') + 1, clock[1] * 1000000 + clock[2]))
  redis.call('HSET', job, 'state', 'claimed', 'fence', fence, 'message', message, 'list', list,
    'attempts', attempts, 'worker', worker, 'progress', 0, 'company', 0,
    'history', history .. worker .. ' ' .. now_ms .. '\n')
  redis.call('HSETNX', job, 'first_claim_ms', now_ms)
  local first_claim_ms = redis.call('HGET', job, 'first_claim_ms')
  redis.call('PERSIST', job)
  redis.call('ZADD', leases, now_ms + lease_ms, id)
  if attempts > 1 then
    redelivered[#redelivered + 1] = id
  end
  taken[#taken + 1] = {id, message, attempts, fence, list, from_suspects and 1 or 0,
    first_claim_ms, now_ms, state and 0 or 1, redis.call('EXISTS', job .. ':cancel')}
  if not waits then
    store(id, document_of(ARGV[11], id))
  end
  return true
end

-- Progress clears a suspect, but not one that lost two workers in company: it may have come upon its
-- fatal token after some that were not journalled, and would do so again.
local holds_suspect = false
if ARGV[6] ~= '' then
  local record = redis.call('HMGET', 'llorch:job:' .. ARGV[6], 'progress', 'spared')
  holds_suspect = record[1] == '0' or record[2] ~= false
end

if #redelivered == 0 and not holds_suspect then
  -- The first that is really run; copies and exhausted ones do not count.
  while #taken == 0 do
    local message = redis.call('RPOP', suspects)
    if not message then
      break
    end
    take(message, suspects, true, true)
  end
  holds_suspect = #taken > 0
end

for i = 4, #KEYS do
  while #taken < limit do
    local message = redis.call('RPOP', KEYS[i])
    if not message then
      break
    end
    if not take(message, KEYS[i], false, not holds_suspect) then
      redis.call('RPUSH', KEYS[i], message)
      break
    end
  end
end

if #redelivered > 1 and #redelivered > redelivered_before then
  for _, id in ipairs(redelivered) do
    redis.call('HSET', 'llorch:job:' .. id, 'company', 1)
  end
end
local answer = {#taken}
for _, claim in ipairs(taken) do
  for _, value in ipairs(claim) do
    answer[#answer + 1] = value
  end
end
answer[#answer + 1] = #buried
answer[#answer + 1] = untold
answer[#answer + 1] = untold_bytes
for _, letter in ipairs(buried) do
  answer[#answer + 1] = letter[1]
  answer[#answer + 1] = letter[2]
end
return answer
