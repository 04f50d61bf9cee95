-- Replaces the metadata of a lock if its owner still holds it.
--
-- KEYS  1 lock   2 meta ("OWNER METADATA")
-- ARGV  1 owner  2 metadata (JSON)
-- Returns 1 if replaced, 0 if the lock is free, -1 if another owner holds it.
local holder = redis.pcall('GET', KEYS[1])
if holder ~= ARGV[1] then
  return holder and -1 or 0
end
side('PSETEX', KEYS[2], math.max(redis.call('PTTL', KEYS[1]), 1), ARGV[1] .. ' ' .. ARGV[2])
return 1
