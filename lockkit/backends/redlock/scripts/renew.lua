-- Renews a lock on one node if it still has our value there. Never creates it.
--
-- KEYS  1 lock   2 fence   3 meta   4 broken (value of a lease that was ended by force)   5 mark
-- ARGV  1 value  2 ttl_ms  3 fence_ms
-- Returns 1 if renewed, 0 if the lock is free, -1 if it has another value, -2 if it was freed by force.
local holder = redis.pcall('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  redis.call('PEXPIRE', KEYS[3], ARGV[2])
  local known = redis.call('HGET', KEYS[5], 'ttl_ms')
  if known and tonumber(known) < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[5], 'ttl_ms', ARGV[2])
  end
  return 1
end
if redis.call('GET', KEYS[4]) == ARGV[1] then
  return -2
end
return holder and -1 or 0
