-- Gives a lock that one owner holds to another, who waits for nobody.
--
-- KEYS  1 lock   2 fence (see acquire.lua)
-- ARGV  1 owner  2 ttl_ms  3 metadata (JSON)  4 fence_ms  5 the owner who holds it
-- Returns the new token, or 0 if that owner does not hold it.
local lock, fence, owner = KEYS[1], KEYS[2], ARGV[1]
local holder = redis.pcall('GET', lock)
if holder ~= ARGV[5] and holder ~= owner then
  return 0
end
local last, sign, of = string.match(redis.call('GET', fence) or '', '^(%d+)([ +])(%S*)')
if holder == owner and of == owner then
  return tonumber(last)  -- asked again: the first answer was lost
end
local time = redis.call('TIME')
local token = time[1] .. string.sub('00000' .. time[2], -6)
if last and (#last > #token or (#last == #token and last >= token)) then
  token = string.format('%.0f', tonumber(last) + 1)
end
-- The sign stays: those who wait, wait on.
redis.call('SET', fence, token .. (sign or '+') .. owner .. ' ' .. ARGV[3], 'PX', ARGV[4])
redis.call('SET', lock, owner, 'PX', ARGV[2])
return tonumber(token)
