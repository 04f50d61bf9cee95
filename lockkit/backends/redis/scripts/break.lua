-- Frees a lock by force, and offers it to the first waiters.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 broken   4 queue   5 shares   6 leases
-- ARGV  1 fence_ms   2 number of the permit to free, or "" for all that holds the lock
--       3 "1" to leave alone what may be data of an application: a key without expiry and without a record beside it
-- Returns 1, or 0 if it was not held, or -1 if it was left alone.
-- With the functions of shares.lua and offer.lua:
local lock, fence, shares, leases = KEYS[1], KEYS[2], KEYS[5], KEYS[6]
local holder = redis.pcall('GET', lock)
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
end
if holder and ARGV[3] == '1' and redis.call('PTTL', lock) < 0
    and redis.call('EXISTS', fence, KEYS[3], KEYS[4], shares, leases) == 0 then
  return -1
end
if holder == SHARED then
  unfold(fence, shares, leases)
  prune(shares, leases)
  if ARGV[2] ~= '' then
    local permit = redis.call('ZRANGEBYSCORE', shares, -1 - ARGV[2], -1 - ARGV[2])[1]
    local owner = permit and string.sub(permit, 2)
    if not owner or redis.call('HDEL', leases, owner) == 0 then
      return 0  -- free, or only offered
    end
    redis.call('ZREM', shares, owner, permit)
    local left_ms = math.max(redis.call('PTTL', lock), redis.call('PTTL', KEYS[3]), 0)
    redis.call('SET', KEYS[3], (redis.call('GET', KEYS[3]) or '') .. ' ' .. owner, 'PX', left_ms + 1000)
    advance(lock, KEYS[4], shares, leases)
    return 1
  end
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
redis.call('DEL', lock, shares, leases)
-- Kept for the owners' next renewal; after its ttl they have lost the lock anyway.
redis.call('SET', KEYS[3], holder, 'PX', left_ms > 0 and left_ms + 1000 or 60000)
local time = redis.call('TIME')
local last = tonumber(string.match(redis.call('GET', fence) or '', '^%d+') or 0)
local token = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', fence, string.format('%.0f', token) .. '+', 'PX', ARGV[1])
offer(lock, KEYS[4], shares)
return 1
