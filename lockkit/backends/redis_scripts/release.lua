-- Frees a lock if its owner still holds it, and offers it to the first waiter.
--
-- KEYS  1 lock   2 meta   3 queue
-- ARGV  1 owner
-- Returns 1, or 0 if it was not the owner's.

-- pcall: a key of another type is not the owner's lock.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if offer(KEYS[1], KEYS[3]) then
  redis.call('DEL', KEYS[2])
else
  redis.call('DEL', KEYS[1], KEYS[2])
end
return 1
