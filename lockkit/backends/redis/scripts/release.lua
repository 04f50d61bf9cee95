-- Frees a lock if its owner still holds it, and offers it to the first waiter.
--
-- KEYS  1 lock   2 meta   3 queue
-- ARGV  1 owner  2 channel of all clients (for a lock that has vanished)
-- Returns 1, or 0 if the owner did not hold it.

-- pcall: a key of another type is not the owner's lock.
local holder = redis.pcall('GET', KEYS[1])
if holder ~= ARGV[1] then
  if not holder then
    redis.call('PUBLISH', ARGV[2], KEYS[1])
  end
  return 0
end
if not offer(KEYS[1], KEYS[3]) then
  redis.call('DEL', KEYS[1])
end
side('DEL', KEYS[2])
return 1
