-- Frees a lock on one node if it has our value there, and notifies the first waiter.
--
-- KEYS  1 lock   2 meta   3 queue
-- ARGV  1 value
-- Returns 1, or 0 if it had another value.

-- pcall: a key of another type is not our lock.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
notify(KEYS[3])
return 1
