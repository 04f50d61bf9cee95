-- Renews a lease if its owner still has it. Never creates it.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 broken (owners of the leases that were ended by force)   4 shares
--       5 leases
-- ARGV  1 owner  2 ttl_ms  3 fence_ms  4 channel of all clients (for a lock that has vanished)
-- Returns 1 if renewed, 0 if the lock is free, -1 if another owner holds it, -2 if it was freed by force.
local holder = redis.pcall('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  side('PEXPIRE', KEYS[2], ARGV[3])
  return 1
end
-- With the functions of shares.lua:
if holder == SHARED and alone then
  -- With what is at this node.
  local lone = '^(%d+[ +]' .. SHARED .. ' ' .. ARGV[1] .. ' %S+) %d+ (.*)$'
  local before, rest = string.match(tostring(side('GET', KEYS[2])), lone)
  local ends = side('ZSCORE', KEYS[4], ARGV[1])
  if before then
    side('SET', KEYS[2], before .. ' ' .. digits(now_ms() + ARGV[2]) .. ' ' .. rest, 'PX', ARGV[3])
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return 1
  elseif type(ends) == 'table' then
    return try_again()
  elseif ends and tonumber(ends) >= now_ms() then
    side('ZADD', KEYS[4], digits(now_ms() + ARGV[2]), ARGV[1])
    keep(KEYS[4], KEYS[1], KEYS[5])
    return 1
  end
elseif holder == SHARED then
  unfold(KEYS[2], KEYS[4], KEYS[5])
  if has_share(KEYS[4], KEYS[5], ARGV[1]) then
    -- First, because a server that is out of memory refuses a script whose first write adds data.
    redis.call('PEXPIRE', KEYS[2], ARGV[3])
    redis.call('ZADD', KEYS[4], digits(now_ms() + ARGV[2]), ARGV[1])
    keep(KEYS[4], KEYS[1], KEYS[5])
    return 1
  end
end
local broken = side('GET', KEYS[3])
if type(broken) == 'string' and string.find(' ' .. broken .. ' ', ' ' .. ARGV[1] .. ' ', 1, true) then
  return -2
end
if not holder then
  -- The queue may have vanished too (FLUSHALL): then only this message notifies the waiters.
  redis.pcall('PUBLISH', ARGV[4], KEYS[1])
end
return holder and holder ~= SHARED and -1 or 0
