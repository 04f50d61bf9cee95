-- Turns the lease of a lock into that of a reader, and offers places beside it to the readers who wait first.
--
-- KEYS  1 lock   2 meta   3 queue   4 shares   5 leases
-- ARGV  1 owner  2 token  3 ttl_ms (for a lock that somebody made permanent)
-- Returns 1, or 0 if the owner did not hold it.
-- With the functions of shares.lua and offer.lua:
local lock, shares, leases, owner = KEYS[1], KEYS[4], KEYS[5], ARGV[1]
local holder = redis.pcall('GET', lock)
if holder == SHARED then
  -- Asked again: the first answer was lost.
  unfold(KEYS[2], shares, leases)
  return has_share(shares, leases, owner) and 1 or 0
end
if holder ~= owner then
  return 0
end
local left_ms = redis.call('PTTL', lock)
if left_ms < 0 then
  left_ms = ARGV[3]
end
local meta = redis.call('GET', KEYS[2]) or ''
local metadata = string.sub(meta, 1, #owner + 1) == owner .. ' ' and string.sub(meta, #owner + 2) or ''
redis.call('DEL', KEYS[2])
redis.call('SET', lock, SHARED, 'PX', left_ms)
redis.call('ZADD', shares, digits(now_ms() + left_ms), owner)
redis.call('HSET', leases, owner, ARGV[2] .. ' ' .. metadata)
keep(shares, lock, leases)
offer(lock, KEYS[3], shares, nil, 1)
return 1
