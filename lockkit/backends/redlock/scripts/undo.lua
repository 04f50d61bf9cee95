-- Takes back the vote of one node for an attempt that won no majority. Notifies no waiter: nobody took the lock for held.
--
-- KEYS  1 lock
-- ARGV  1 value
-- Returns 1, or 0 if there was nothing to take back.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
