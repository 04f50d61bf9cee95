-- Replaces the metadata of a lease if its owner still has it.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 shares   4 leases
-- ARGV  1 owner  2 metadata (JSON)
-- Returns 1 if replaced, 0 if the lock is free, -1 if another owner holds it.
-- With the functions of shares.lua:
local holder = redis.pcall('GET', KEYS[1])
if holder == SHARED then
  if alone then
    return try_again()
  end
  unfold(KEYS[2], KEYS[3], KEYS[4])
  if not has_share(KEYS[3], KEYS[4], ARGV[1]) then
    return 0
  end
  local token = string.match(redis.call('HGET', KEYS[4], ARGV[1]), '^%d+') or '0'
  redis.call('HSET', KEYS[4], ARGV[1], token .. ' ' .. ARGV[2])
  return 1
end
if holder ~= ARGV[1] then
  return holder and -1 or 0
end
local before = string.match(tostring(side('GET', KEYS[2])), '^%d+[ +]' .. ARGV[1] .. ' ')
if before then
  side('SET', KEYS[2], before .. ARGV[2], 'KEEPTTL')
end
return 1
