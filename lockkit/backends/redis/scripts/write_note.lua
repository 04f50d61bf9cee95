-- Puts a note on a lock if its owner still holds it.
--
-- KEYS  1 lock   2 note
-- ARGV  1 owner  2 text  3 keep_ms
-- Returns 1, or 0 if the owner does not hold it.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('PSETEX', KEYS[2], ARGV[3], ARGV[2])
return 1
