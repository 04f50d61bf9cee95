-- Ends a lease if its owner still has it, and offers the lock to the first waiters.
--
-- KEYS  1 lock   2 meta   3 queue   4 shares   5 leases
-- ARGV  1 owner  2 channel of all clients (for a lock that has vanished)
-- Returns 1, or 0 if the owner did not hold it.

-- pcall: a key of another type is not the owner's lock.
local holder = redis.pcall('GET', KEYS[1])
if holder == ARGV[1] then
  if not offer(KEYS[1], KEYS[3], KEYS[4]) then
    redis.call('DEL', KEYS[1])
  end
  side('DEL', KEYS[2])
  return 1
end
if holder == SHARED then
  if alone then
    return try_again()
  end
  prune(KEYS[4], KEYS[5])
  if redis.call('ZREM', KEYS[4], ARGV[1], '#' .. ARGV[1]) == 0 then
    return 0
  end
  redis.call('HDEL', KEYS[5], ARGV[1])
  advance(KEYS[1], KEYS[3], KEYS[4], KEYS[5])
  return 1
end
if not holder then
  redis.call('PUBLISH', ARGV[2], KEYS[1])
end
return 0
