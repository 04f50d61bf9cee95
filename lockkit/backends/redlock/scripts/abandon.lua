-- Removes every trace of a waiter on one node.
--
-- KEYS  1 lock   2 queue
-- ARGV  1 queue entry ("OWNER 0 CHANNEL")
-- Returns 1.
-- With the functions of notify.lua:
if redis.call('LREM', KEYS[2], 1, ARGV[1]) == 0 and redis.call('EXISTS', KEYS[1]) == 0 then
  -- It was notified that the lock is free, and does not take it: notify the next one.
  notify(KEYS[2])
end
return 1
