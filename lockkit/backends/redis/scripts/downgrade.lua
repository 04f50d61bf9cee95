-- Turns the lease of a lock into that of a reader, and offers places beside it to the readers who wait first.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 queue   4 shares   5 leases
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
-- Leases from before a client of another kind removed the lock. First, see shares.lua.
redis.call('DEL', shares, leases)
local last, of, metadata = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+)[ +](%S+) (.*)$')
if last then
  redis.call('SET', KEYS[2], last .. '+', 'KEEPTTL')
end
redis.call('SET', lock, SHARED, 'PX', left_ms)
redis.call('ZADD', shares, digits(now_ms() + left_ms), owner)
redis.call('HSET', leases, owner, ARGV[2] .. ' ' .. (of == owner and metadata or ''))
keep(shares, lock, leases)
offer(lock, KEYS[3], shares, nil, 1)
return 1
