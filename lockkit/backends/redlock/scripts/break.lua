-- Frees a lock on one node by force if it has that value, and notifies the first waiter.
--
-- KEYS  1 lock   2 fence   3 meta   4 broken   5 queue
-- ARGV  1 value of the holder  2 fence_ms
-- Returns 1, or 0 if it has another value there.
local lock, fence = KEYS[1], KEYS[2]
if redis.pcall('GET', lock) ~= ARGV[1] then
  return 0
end
-- Kept for the owner's next renewal; after its ttl it has lost the lock anyway.
local left_ms = redis.call('PTTL', lock)
redis.call('SET', KEYS[4], ARGV[1], 'PX', left_ms > 0 and left_ms + 1000 or 60000)
local time = redis.call('TIME')
local token = math.max(tonumber(redis.call('GET', fence) or 0) + 1, time[1] * 1000000 + time[2])
redis.call('PSETEX', fence, ARGV[2], string.format('%.0f', token))
redis.call('DEL', lock, KEYS[3])
notify(KEYS[5])
return 1
