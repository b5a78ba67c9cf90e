-- Take a lease at maxmemory, where Redis refuses a plain SET.
--
-- KEYS: the lease.
--
-- Returns 1 if nobody held it, else 0.
--
-- Writes at maxmemory.

return redis.call('SET', KEYS[1], 1, 'NX', 'PX', ARGV[1]) and 1 or 0
