-- Tenants of one priority take turns.
--
-- A job with a tenant waits in one of two lists: its tenant's own, or the tenants list of its priority,
-- which holds the next job of each tenant. Whoever pops a tenant's next job puts the one after it to the
-- tail, or to the head while the tenant's weight gives it more. So no call looks at more than one job of
-- a tenant, however many wait. The plain list, of all jobs without a tenant, is one more tenant.

local function is_tenants_list(list)
  return list:find(STEP_SEPARATOR, 1, true) and list:sub(-#TENANTS_MARK) == TENANTS_MARK
end

local function own_list(list, tenant)
  return tenants_key(list) .. '/' .. tenant
end

-- How many jobs of tenants wait behind those in the list.
local function waiting_behind(list)
  return is_tenants_list(list) and tonumber(redis.pcall('HGET', tenants_key(list), '*')) or 0
end

-- How many jobs are in the list. A key of another type holds none.
local function length_alone(list)
  local jobs = redis.pcall('LLEN', list)
  return type(jobs) == 'number' and jobs or 0
end

-- How many jobs wait in the list and behind it.
local function length(list)
  local jobs = length_alone(list)
  return jobs > 0 and jobs + waiting_behind(list) or 0
end

local function push_for_tenant(list, tenant, message)
  local waiting = redis.call('HINCRBY', tenants_key(list), tenant, 1)
  -- A list that somebody deleted begins anew.
  if waiting == 1 or redis.call('EXISTS', list) == 0 then
    redis.call('LPUSH', list, message)
  else
    redis.call('LPUSH', own_list(list, tenant), message)
    redis.call('HINCRBY', tenants_key(list), '*', 1)
  end
end

-- Fill a tenants list that has run empty or was deleted, although jobs of tenants wait behind it.
local function refill(list)
  local state = tenants_key(list)
  for _, tenant in ipairs(redis.call('HKEYS', state)) do
    local message = not tenant:find('^[*/]') and redis.call('RPOP', own_list(list, tenant))
    if message then
      redis.call('LPUSH', list, message)
      redis.call('HINCRBY', state, '*', -1)
      redis.call('HSET', state, tenant, 1 + redis.call('LLEN', own_list(list, tenant)))
    end
  end
end

-- Bring up the job after one of this tenant that was popped. `weights` is tenant=weight,... Once no
-- jobs of tenants wait, only `*turns` stays: a tenant that sends its jobs one by one gets no more turns by that.
local function next_of_tenant(list, tenant, weights)
  local state = tenants_key(list)
  tenant = type(tenant) == 'string' and tenant:match('^[%w._-]+$')
  local message = tenant and redis.call('RPOP', own_list(list, tenant))
  if not message then
    redis.call('HDEL', state, tenant or '', '/' .. (tenant or ''))
    local turns = redis.call('HINCRBY', state, '*turns', 1)
    if redis.call('EXISTS', list) == 0 and waiting_behind(list) > 0 then
      refill(list)
    elseif redis.call('EXISTS', list) == 0 then
      redis.call('DEL', state)
      redis.call('HSET', state, '*turns', turns)
    end
    return
  end
  redis.call('HINCRBY', state, tenant, -1)
  redis.call('HINCRBY', state, '*', -1)
  local weight = 1
  for name, value in weights:gmatch('([%w._-]+)=(%d+)') do
    weight = name == tenant and tonumber(value) or weight
  end
  if weight > 1 and redis.call('HINCRBY', state, '/' .. tenant, 1) < weight then
    redis.call('RPUSH', list, message)
    return
  end
  if weight > 1 then
    redis.call('HSET', state, '/' .. tenant, 0)
  end
  redis.call('LPUSH', list, message)
  redis.call('HINCRBY', state, '*turns', 1)
end
