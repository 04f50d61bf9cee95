-- Puts a note on a lock if its owner still has a lease of it.
--
-- KEYS  1 lock   2 note   3 fence (see acquire.lua)   4 shares   5 leases
-- ARGV  1 owner  2 text  3 keep_ms
-- Returns 1, or 0 if the owner does not hold it.
-- With the functions of shares.lua:
local holder = redis.pcall('GET', KEYS[1])
if holder == SHARED then
  unfold(KEYS[3], KEYS[4], KEYS[5])
  holder = has_share(KEYS[4], KEYS[5], ARGV[1]) and ARGV[1]
end
if holder ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
