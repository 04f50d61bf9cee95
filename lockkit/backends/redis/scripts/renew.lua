-- Starts the ttl of a lock anew if its owner still holds it. Never creates it.
--
-- KEYS  1 lock   2 fence   3 meta   4 broken (owner of the lease that was freed by force)
-- ARGV  1 owner  2 ttl_ms  3 fence_ms  4 channel of all clients (told when the lock has vanished)
-- Returns 1 renewed, 0 nobody holds it, -1 somebody else does, -2 it was freed by force.
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
  -- Perhaps the queue has vanished too (FLUSHALL), and nobody else will tell those who waited in it.
  redis.call('PUBLISH', ARGV[4], KEYS[1])
end
return holder and -1 or 0
