-- Frees a lock on one node if it has our value there, and notifies the first waiter.
--
-- KEYS  1 lock   2 fence (see fence.lua)   3 queue
-- ARGV  1 value
-- Returns 1, or 0 if it had another value.

-- A key of another type is not our lock; MGET returns it as a missing one.
local found = redis.call('MGET', KEYS[1], KEYS[2])
if found[1] ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
-- With the functions of notify.lua:
if not (found[2] and string.find(found[2], '^%d+ ')) then
  notify(KEYS[3])
end
return 1
