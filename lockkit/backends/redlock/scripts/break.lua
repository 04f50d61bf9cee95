-- Frees a lock on one node by force if it has that value, and notifies the first waiter.
--
-- KEYS  1 lock   2 fence (see fence.lua)   3 broken   4 queue
-- ARGV  1 value of the holder  2 fence_ms
-- Returns 1, or 0 if it has another value there.
-- With the functions of notify.lua:
local lock, fence = KEYS[1], KEYS[2]
if redis.pcall('GET', lock) ~= ARGV[1] then
  return 0
end
-- Kept for the owner's next renewal; after its ttl it has lost the lock anyway.
local left_ms = redis.call('PTTL', lock)
redis.call('SET', KEYS[3], ARGV[1], 'PX', left_ms > 0 and left_ms + 1000 or 60000)
local time = redis.call('TIME')
local last = tonumber(string.match(redis.call('GET', fence) or '', '^%d+') or 0)
local token = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', fence, string.format('%.0f', token) .. '+', 'PX', ARGV[2])
redis.call('DEL', lock)
notify(KEYS[4])
return 1
