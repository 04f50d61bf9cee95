-- Takes a lock, exclusively or beside others, or enters its queue.
--
-- KEYS  1 lock   2 fence (the last token)   3 meta ("OWNER METADATA")   4 queue (see offer.lua)
--       5 shares   6 leases (see shares.lua)
-- ARGV  1 owner  2 ttl_ms  3 metadata (JSON)  4 fence_ms (how long the counter is kept)
--       5 entry for the queue without the owner: "GRACE_MS CHANNEL", or "" not to wait
--       6 "" exclusively, "0" as a reader, or how many permits may be held
-- Returns the token if granted ("TOKEN NUMBER" for a permit), otherwise
-- {ttl_ms left (-1: for ever), owner ("" if only offered), 1 if foreign}.
local lock, fence, meta, queue, shares, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local owner, ttl_ms, waiter, limit = ARGV[1], ARGV[2], ARGV[5], ARGV[6]

-- Returns a new token, and the server's time in ms.
local function next_token()
  local time = redis.call('TIME')
  -- A string: strings of equally many digits compare as numbers do, and Lua would write the number as 1.7e+15.
  local token = time[1] .. string.sub('00000' .. time[2], -6)
  local last = redis.call('GET', fence)
  if last and (#last > #token or (#last == #token and last >= token)) then
    token = string.format('%.0f', tonumber(last) + 1)
  end
  redis.call('PSETEX', fence, ARGV[4], token)
  return token, time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Grants a lock that nobody has.
local function grant()
  local token, now_ms = next_token()
  if limit == '' then
    redis.call('PSETEX', meta, ttl_ms, owner .. ' ' .. ARGV[3])
    return tonumber(token)
  end
  local number = limit == '0' and '-' or '0'
  local ends = string.format('%.0f', now_ms + ttl_ms)
  redis.call('PSETEX', meta, ttl_ms, table.concat({'shared', owner, number, ends, token, ARGV[3]}, ' '))
  return limit == '0' and tonumber(token) or token .. ' 0'
end

local free = redis.call('SET', lock, limit == '' and owner or SHARED, 'NX', 'PX', ttl_ms)
-- 1 if only the queue is there, 2 or 3 if there are shares.
local there = free and redis.call('EXISTS', queue, shares, shares)
if there == 0 then
  return grant()
end
-- With the functions of shares.lua and offer.lua:

-- The lowest number of a permit that nobody has, or that which the owner has already.
local function free_number()
  local number = redis.call('ZSCORE', shares, '#' .. owner)
  if number then
    return -1 - number
  end
  -- All numbers up to `low - 1` are taken, and not all up to `high`.
  local low, high = 0, redis.call('ZCOUNT', shares, '-inf', -1)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZCOUNT', shares, -1 - middle, -1) == middle + 1 then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Grants a place beside others.
local function grant_share()
  local token, now = next_token()
  local number = limit ~= '0' and free_number()
  redis.call('HSET', leases, owner, token .. ' ' .. ARGV[3])
  redis.call('ZADD', shares, digits(now + ttl_ms), owner)
  if number then
    redis.call('ZADD', shares, -1 - number, '#' .. owner)
  end
  keep(shares, lock, leases)
  return number and token .. ' ' .. number or tonumber(token)
end

-- Tells whether a place beside the shares is offered to this request, or is free and nobody waits for it.
local first_again = false
local function has_place()
  local mine = redis.call('ZSCORE', shares, owner)
  if limit ~= '0' and not redis.call('ZSCORE', shares, '#' .. owner) then
    if redis.call('ZCOUNT', shares, '-inf', -1) >= tonumber(limit) then
      -- Permits of a higher limit were offered with its own, and taken before it came.
      first_again = mine and redis.call('ZREM', shares, owner) == 1
      return false
    end
  end
  return mine
    or (redis.call('EXISTS', queue) == 0 and (limit == '0' or count_shares(shares) < tonumber(limit)))
end

local holder
if free then
  -- Leases from before a client of another kind removed the lock.
  if there > 1 then
    redis.call('DEL', shares, leases)
  end
  -- The lock expired or a foreign client freed it, so nothing notified the waiters: they come first.
  holder = offer(lock, queue, shares, owner)
  if holder == nil or holder == owner then
    return grant()
  elseif holder == SHARED then
    redis.call('DEL', meta)
  end
else
  holder = redis.pcall('GET', lock)
  if type(holder) == 'table' then
    return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
  end
  -- Granted or offered to this request already: the answer was lost.
  if holder == owner or holder == 'next:' .. owner then
    redis.call('SET', lock, owner, 'PX', ttl_ms)
    return grant()
  end
  if holder == SHARED then
    unfold(meta, shares, leases)
  end
  if holder == SHARED and limit ~= '' then
    prune(shares, leases)
    if redis.call('EXISTS', queue) == 1 then
      holder = offer(lock, queue, shares, owner, count_shares(shares)) or SHARED
    end
  end
end
if holder == SHARED and limit ~= '' and has_place() then
  return grant_share()
end

local offered = string.sub(holder, 1, 5) == 'next:'
local foreign = not offered and holder ~= SHARED and redis.call('GETRANGE', meta, 0, #holder - 1) ~= holder
local left_ms = redis.call('PTTL', lock)
local retry_ms = left_ms
if holder == SHARED then
  local first = redis.call('ZRANGEBYSCORE', shares, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  holder = first[1] or ''
  if first[2] and tonumber(limit) ~= 0 and limit ~= '' then
    retry_ms = math.max(first[2] - now_ms(), 0)
  end
end

if waiter ~= '' then
  local entry = owner .. ' ' .. waiter
  if not redis.call('LPOS', queue, entry) then
    local length = redis.call(first_again and 'LPUSH' or 'RPUSH', queue, entry)
    if length % 16 == 0 then
      -- Entries of dead clients remain until it is their turn: do not let them pile up behind a long lease.
      for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
        local channel = string.match(other, '^%S+ %S+ (.+)$')
        if redis.call('PUBSUB', 'NUMSUB', channel)[2] == 0 then
          redis.call('LREM', queue, 1, other)
        end
      end
    end
  end
  -- Kept until all waiters have retried, which they do when the holder's ttl ends.
  local keep_ms = math.max(left_ms, tonumber(ttl_ms)) + 10000
  if redis.call('PTTL', queue) < keep_ms then
    redis.call('PEXPIRE', queue, string.format('%.0f', keep_ms))
  end
end
return {retry_ms, offered and '' or holder, foreign and 1 or 0}
