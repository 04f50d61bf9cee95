-- Round two on one node: writes the token if the lock still has our value, so that every later grant finds it.
--
-- KEYS  1 lock   2 fence
-- ARGV  1 value  2 token  3 fence_ms (how long the counter is kept)
-- Returns 1, or 0 if the lock has another value there.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
-- Never lowered: this message may arrive late, after a newer grant.
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[2]) then
  redis.call('PSETEX', KEYS[2], ARGV[3], ARGV[2])
end
return 1
