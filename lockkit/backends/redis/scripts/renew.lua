-- Renews a lock if its owner still holds it. Never creates it.
--
-- KEYS  1 lock   2 fence   3 meta   4 broken (owner of a lease that was ended by force)
-- ARGV  1 owner  2 ttl_ms  3 fence_ms  4 channel of all clients (for a lock that has vanished)
-- Returns 1 if renewed, 0 if the lock is free, -1 if another owner holds it, -2 if it was freed by force.
local holder = redis.pcall('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  side('PEXPIRE', KEYS[2], ARGV[3])
  side('PEXPIRE', KEYS[3], ARGV[2])
  return 1
end
if side('GET', KEYS[4]) == ARGV[1] then
  return -2
end
if not holder then
  -- The queue may have vanished too (FLUSHALL): then only this message notifies the waiters.
  redis.call('PUBLISH', ARGV[4], KEYS[1])
end
return holder and -1 or 0
