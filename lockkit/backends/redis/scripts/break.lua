-- Frees a lock by force, and offers it to the first waiters.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 broken   4 queue   5 shares   6 leases
-- ARGV  1 fence_ms
-- Returns 1, or 0 if it was not held.
-- With the functions of holder.lua, shares.lua and offer.lua:
local lock, fence, shares, leases = KEYS[1], KEYS[2], KEYS[5], KEYS[6]
local holder, session = look(lock)
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
end
if holder == SHARED then
  unfold(fence, shares, leases)
  prune(shares, leases)
  holder = redis.call('HKEYS', leases)
  if #holder == 0 then
    return 0
  end
  holder = table.concat(holder, ' ')
elseif not holder or string.sub(holder, 1, 5) == 'next:' then
  if session then
    -- It has ended with its session.
    redis.call('DEL', lock)
    offer(lock, KEYS[4], shares)
  end
  return 0
end
local left_ms = redis.call('PTTL', lock)
-- First, because a server that is out of memory refuses a script whose first write adds data, but not one that begins
-- with a deletion.
redis.call('DEL', lock, shares, leases)
-- Kept for the owners' next renewal; after its ttl they have lost the lock anyway.
redis.call('SET', KEYS[3], holder, 'PX', left_ms > 0 and left_ms + 1000 or 60000)
if session and session ~= '' then
  redis.call('SET', session, redis.call('GET', session) .. holder .. ' ', 'KEEPTTL')
end
local time = redis.call('TIME')
local last = tonumber(string.match(redis.call('GET', fence) or '', '^%d+') or 0)
local token = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', fence, string.format('%.0f', token) .. '+', 'PX', ARGV[1])
offer(lock, KEYS[4], shares)
return 1
