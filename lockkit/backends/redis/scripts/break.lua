-- Frees a lock by force, and offers it to the first waiters.
--
-- KEYS  1 lock   2 fence   3 meta   4 broken   5 queue   6 shares   7 leases
-- ARGV  1 fence_ms
-- Returns 1, or 0 if it was not held.
-- With the functions of shares.lua and offer.lua:
local lock, fence, shares, leases = KEYS[1], KEYS[2], KEYS[6], KEYS[7]
local holder = redis.pcall('GET', lock)
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
end
if holder == SHARED then
  unfold(KEYS[3], shares, leases)
  prune(shares, leases)
  holder = redis.call('HKEYS', leases)
  if #holder == 0 then
    return 0
  end
  holder = table.concat(holder, ' ')
elseif not holder or string.sub(holder, 1, 5) == 'next:' then
  return 0
end
local left_ms = redis.call('PTTL', lock)
-- First, because a server that is out of memory refuses a script whose first write adds data, but not one that begins
-- with a deletion.
redis.call('DEL', lock, KEYS[3], shares, leases)
-- Kept for the owners' next renewal; after its ttl they have lost the lock anyway.
redis.call('SET', KEYS[4], holder, 'PX', left_ms > 0 and left_ms + 1000 or 60000)
local time = redis.call('TIME')
local token = math.max((tonumber(redis.call('GET', fence) or 0) or 0) + 1, time[1] * 1000000 + time[2])
redis.call('PSETEX', fence, ARGV[1], string.format('%.0f', token))
offer(lock, KEYS[5], shares)
return 1
