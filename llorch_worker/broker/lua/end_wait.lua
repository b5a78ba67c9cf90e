-- End a worker's wait for jobs with a ring of its own, also at maxmemory.
--
-- KEYS: its own bell.

allow_writes()
redis.call('LPUSH', KEYS[1], 1)
redis.call('EXPIRE', KEYS[1], ARGV[1]) -- if the worker dies
