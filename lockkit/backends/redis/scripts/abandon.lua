-- Removes every trace of a request that was not granted, or whose grant had no answer.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 queue   4 shares   5 leases
-- ARGV  1 owner  2 its queue entry without the owner: "GRACE_MS CHANNEL", or ""  3 what the entry was before, or ""
-- Returns 1 if it held the lock, a place in it or an offer, else 0.
-- With the functions of shares.lua and offer.lua:
local owner = ARGV[1]
for number = 2, 3 do
  if ARGV[number] ~= '' then
    side('LREM', KEYS[3], 1, owner .. ' ' .. ARGV[number])
  end
end
local holder = redis.pcall('GET', KEYS[1])
if holder == SHARED then
  if alone then
    return try_again()
  end
  unfold(KEYS[2], KEYS[4], KEYS[5])
  local held = redis.call('ZREM', KEYS[4], owner, '#' .. owner)
  redis.call('HDEL', KEYS[5], owner)
  -- Also if it only waited: those behind it may fit.
  advance(KEYS[1], KEYS[3], KEYS[4], KEYS[5])
  return held > 0 and 1 or 0
end
if holder ~= owner and holder ~= 'next:' .. owner then
  return 0
end
if not offer(KEYS[1], KEYS[3], KEYS[4]) then
  redis.call('DEL', KEYS[1])
end
return 1
