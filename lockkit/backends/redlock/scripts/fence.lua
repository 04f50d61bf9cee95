-- Round two on one node: writes the token if the lock still has our value, so that every later grant finds it.
--
-- fence is the record of the last grant: "TOKEN VALUE METADATA". It counts for a lease only while the lock has that value.
-- "+" instead of the first space says that there may be a queue: as long as there is one, the record is not there or has
-- no such space.
--
-- KEYS  1 lock   2 fence   3 queue
-- ARGV  1 value  2 token  3 fence_ms (how long the record is kept)  4 metadata (JSON)
-- Returns 1, or 0 if the lock has another value there.

-- A key of another type is not our lock; MGET returns it as a missing one.
local found = redis.call('MGET', KEYS[1], KEYS[2])
if found[1] ~= ARGV[1] then
  return 0
end
local last, sign = string.match(found[2] or '', '^(%d+)(.?)')
-- Never lowered: this message may arrive late, or restore a key after another client's attempt.
if last and tonumber(last) > tonumber(ARGV[2]) then
  return 1
end
if sign ~= ' ' then
  sign = redis.call('EXISTS', KEYS[3]) == 0 and ' ' or '+'
end
redis.call('SET', KEYS[2], ARGV[2] .. sign .. ARGV[1] .. ' ' .. ARGV[4], 'PX', ARGV[3])
return 1
