-- Removes every trace of a request that was not granted, or whose grant was not heard of.
--
-- KEYS  1 lock   2 meta   3 queue
-- ARGV  1 owner  2 its place in the queue: "GRACE_MS CHANNEL", or ""
-- Returns 1 if it had held the lock or an offer, else 0.
local owner = ARGV[1]
if ARGV[2] ~= '' then
  side('LREM', KEYS[3], 1, owner .. ' ' .. ARGV[2])
end
local holder = redis.pcall('GET', KEYS[1])
if holder ~= owner and holder ~= 'next:' .. owner then
  return 0
end
if not offer(KEYS[1], KEYS[3]) then
  redis.call('DEL', KEYS[1])
end
-- Of an offer there is no metadata, but perhaps still that of a lease that ran out.
side('DEL', KEYS[2])
return 1
