-- Renews a lock on one node if it still has our value there. Never creates it.
--
-- KEYS  1 lock   2 fence (see fence.lua)   3 broken (value of a lease that was ended by force)   4 mark (see admit.lua)
-- ARGV  1 value  2 ttl_ms  3 fence_ms
-- Returns 1 if renewed, 0 if the lock is free, -1 if it has another value, -2 if it was freed by force.
local holder = redis.pcall('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  local run, longest_ms, times = string.match(redis.call('GET', KEYS[4]) or '', '^(%S+) (%d+) (%d+ %d+.*)$')
  if run and tonumber(longest_ms) < tonumber(ARGV[2]) then
    redis.call('SET', KEYS[4], table.concat({run, ARGV[2], times}, ' '))
  end
  return 1
end
if redis.call('GET', KEYS[3]) == ARGV[1] then
  return -2
end
return holder and -1 or 0
