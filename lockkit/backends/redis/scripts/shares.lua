-- Shared by other scripts: leases beside one another, of readers or of permits.
--
-- While there are any, the lock's value is SHARED (see keys.py), which is no owner, until the last of them ends: so no client of
-- another kind takes the lock. Each has an entry in the sorted set `shares`: its owner, by the server's time at which it
-- ends, ms. An entry without a token in the hash `leases` (owner: "TOKEN METADATA") is a place that is offered to a
-- waiter until then. A permit has a second entry, "#OWNER", with -1 - its number.
-- A lease that has found the lock free is written to `fence` only, as "TOKEN SHARED OWNER NUMBER ENDS METADATA" ("-" for
-- the number of a reader): so a lease that stays alone costs no more than an exclusive one. Each script that leaves the
-- lock with the value SHARED for others than that lease removes it from `fence`.
local clock
-- The server's time: {seconds, microseconds}, the same for the whole script.
local function server_time()
  clock = clock or redis.call('TIME')
  return clock
end

local function now_ms()
  local time = server_time()
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Lua would write a number of that size as 1.7e+12.
local function digits(number)
  return string.format('%.0f', number)
end

-- Moves a lease that was alone to where it can have others beside it.
local function unfold(fence, shares, leases)
  local record = redis.call('GET', fence)
  local token, owner, number, ends, metadata =
    string.match(record or '', '^(%d+)[ +]' .. SHARED .. ' (%S+) (%S+) (%d+) (.*)$')
  if not owner then
    return
  end
  -- What is there is of before the lease. First, because a server that is out of memory refuses a script whose first
  -- write adds data, but not one that begins with a deletion.
  redis.call('DEL', shares, leases)
  redis.call('SET', fence, token .. '+', 'KEEPTTL')
  local left_ms = ends - now_ms()
  if left_ms >= 0 then
    redis.call('ZADD', shares, ends, owner)
    if tonumber(number) then
      redis.call('ZADD', shares, -1 - number, '#' .. owner)
    end
    redis.call('HSET', leases, owner, token .. ' ' .. metadata)
    redis.call('PEXPIRE', shares, digits(math.max(left_ms, 1)))
    redis.call('PEXPIRE', leases, digits(math.max(left_ms, 1)))
  end
end

-- Removes the entries whose time has come. As with the expiry of a key, the last millisecond still counts.
local function prune(shares, leases)
  for _, owner in ipairs(side('ZRANGEBYSCORE', shares, 0, '(' .. digits(now_ms()))) do
    side('ZREM', shares, owner, '#' .. owner)
    side('HDEL', leases, owner)
  end
end

local function count_shares(shares)
  local count = side('ZCOUNT', shares, 0, '+inf')
  return type(count) == 'number' and count or 0
end

-- Tells whether an owner has a lease among the shares that has not ended.
local function has_share(shares, leases, owner)
  local ends = redis.call('ZSCORE', shares, owner)
  return ends and tonumber(ends) >= now_ms() and redis.call('HEXISTS', leases, owner) == 1
end

-- Lets the keys expire with the last share, and returns in how many ms that is.
local function keep(shares, ...)
  local last = side('ZRANGE', shares, -1, -1, 'WITHSCORES')[2]
  if not last then
    return 0
  end
  local left_ms = math.max(last - now_ms(), 1)
  for _, key in ipairs({shares, ...}) do
    side('PEXPIRE', key, digits(left_ms))
  end
  return left_ms
end

-- The keys of shares are needed together, and while their slot moves some may be at another node.
local function try_again()
  return redis.error_reply('TRYAGAIN the keys of a lock that is held by several are moving')
end
