-- Ends a lease if its owner still has it, and offers the lock to the first waiters.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 queue   4 shares   5 leases
-- ARGV  1 owner  2 channel of all clients (for a lock that has vanished)
-- Returns 1, or 0 if the owner did not hold it.
local lock, owner = KEYS[1], ARGV[1]
-- A key of another type is not the owner's lock; MGET returns it as a missing one.
local found = side('MGET', lock, KEYS[2])
if found.err then
  found = {redis.pcall('GET', lock)}
end
local holder, record = found[1], found[2]
local alone_there = holder == owner
if holder == SHARED then
  alone_there = record and string.match(record, '^%d+[ +](%S+ %S+)') == SHARED .. ' ' .. owner
end
local first
if alone_there then
  -- Without a record, or with another sign, there may be a queue.
  first = not (record and string.find(record, '^%d+ ')) and side('LPOP', KEYS[3])
  if type(first) ~= 'string' then
    redis.call('DEL', lock)
    return 1
  end
end
-- With the functions of shares.lua and offer.lua:
if alone_there then
  if not offer(lock, KEYS[3], KEYS[4], nil, 0, first) then
    redis.call('DEL', lock)
  elseif holder == SHARED then
    -- The lock may have the same value again, for those to whom it is offered.
    side('SET', KEYS[2], string.match(record, '^%d+') .. '+', 'KEEPTTL')
  end
  return 1
end
if holder == SHARED then
  if not alone then
    unfold(KEYS[2], KEYS[4], KEYS[5])
  end
  prune(KEYS[4], KEYS[5])
  local removed = side('ZREM', KEYS[4], owner, '#' .. owner)
  if removed == 0 then
    return 0
  elseif type(removed) ~= 'number' then
    return try_again()
  end
  side('HDEL', KEYS[5], owner)
  advance(lock, KEYS[3], KEYS[4], KEYS[5])
  return 1
end
if not holder then
  redis.pcall('PUBLISH', ARGV[2], lock)
end
return 0
