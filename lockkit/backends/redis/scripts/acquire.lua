-- Takes a lock, exclusively or beside others, or enters its queue.
--
-- KEYS  1 lock   2 fence   3 queue (see offer.lua)   4 shares   5 leases (see shares.lua)
-- ARGV  1 owner  2 ttl_ms  3 metadata (JSON)  4 fence_ms (how long the record is kept)
--       5 entry for the queue without the owner: "GRACE_MS CHANNEL", or "" not to wait
--       6 "" exclusively, "0" as a reader, or how many permits may be held
--       7 the entry in the queue that 5 replaces in its place, because the limit is another one now, or ""
-- Returns the token if granted ("TOKEN NUMBER" for a permit), otherwise
-- {ttl_ms left (-1: for ever), owner ("" if only offered), 1 if foreign}.
--
-- fence is the record of the last grant: "TOKEN OWNER METADATA". It counts for a lease only while the lock has that
-- owner, so nothing need be written or deleted beside the lock when a lease ends. "+" instead of the first space says
-- that there may be a queue or shares: as long as there are any, the record is not there or has no such space. So one
-- look at the record, which has to be read anyway, is one at all of these keys.
local lock, fence, queue, shares, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local owner, ttl_ms, waiter, limit = ARGV[1], ARGV[2], ARGV[5], ARGV[6]

-- Replaces the record, with a new token, `sign`, and the lease unless it is in `shares`.
-- Returns the token and the sign of the former record.
local function next_token(sign, is_share)
  local time = redis.call('TIME')
  -- A string: strings of equally many digits compare as numbers do, and Lua would write the number as 1.7e+15.
  local token = time[1] .. string.sub('00000' .. time[2], -6)
  local lease = ''
  if is_share then
    sign = '+'
  elseif limit == '' then
    lease = owner .. ' ' .. ARGV[3]
  else
    local ends = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ttl_ms)
    lease = table.concat({SHARED, owner, limit == '0' and '-' or '0', ends, ARGV[3]}, ' ')
  end
  -- The common case in one command. In the other, no client sees the lower token: a script runs alone.
  local former = redis.call('SET', fence, token .. sign .. lease, 'PX', ARGV[4], 'GET')
  local last, former_sign = string.match(former or '', '^(%d+)(.?)')
  if last and (#last > #token or (#last == #token and last >= token)) then
    token = string.format('%.0f', tonumber(last) + 1)
    redis.call('SET', fence, token .. sign .. lease, 'PX', ARGV[4])
  end
  return token, former_sign
end

-- Returns the answer to a grant of a lock that nobody else has.
local function granted(token)
  return limit ~= '' and limit ~= '0' and token .. ' 0' or tonumber(token)
end

local free = redis.call('SET', lock, limit == '' and owner or SHARED, 'NX', 'PX', ttl_ms)
-- 1 if only the queue is there, 2 or 3 if there are shares.
local there = 0
if free then
  local token, sign = next_token(' ')
  there = sign == ' ' and 0 or redis.call('EXISTS', queue, shares, shares)
  if there == 0 then
    return granted(token)
  end
  redis.call('SET', fence, token .. '+', 'PX', ARGV[4])
end
-- With the functions of shares.lua and offer.lua:

-- Not by LSET: users were not told to give that right.
local place = ARGV[7] ~= '' and redis.call('LPOS', queue, owner .. ' ' .. ARGV[7])
if place then
  local left_ms = math.max(redis.call('PTTL', queue), 1)
  local first = redis.call('LPOP', queue, place + 1)
  first[place + 1] = owner .. ' ' .. waiter
  for number = place + 1, 1, -1 do
    redis.call('LPUSH', queue, first[number])
  end
  redis.call('PEXPIRE', queue, left_ms)
end

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
  local token = next_token('+', true)
  local number = limit ~= '0' and free_number()
  redis.call('HSET', leases, owner, token .. ' ' .. ARGV[3])
  redis.call('ZADD', shares, digits(now_ms() + ttl_ms), owner)
  if number then
    redis.call('ZADD', shares, -1 - number, '#' .. owner)
  end
  keep(shares, lock, leases)
  return number and token .. ' ' .. number or tonumber(token)
end

-- Removes the entry of a request that has got the lock by an earlier entry, of a subscription that has ended: an offer to
-- it would set the end of the lease, or keep a free lock for nobody.
local function leave_queue()
  if waiter ~= '' then
    side('LREM', queue, 1, owner .. ' ' .. waiter)
  end
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
  if mine then
    leave_queue()
    return true
  end
  return redis.call('EXISTS', queue) == 0 and (limit == '0' or count_shares(shares) < tonumber(limit))
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
    leave_queue()
    return granted((next_token('+')))
  end
else
  holder = redis.pcall('GET', lock)
  if type(holder) == 'table' then
    return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
  end
  -- Granted or offered to this request already: the answer was lost.
  if holder == owner or holder == 'next:' .. owner then
    redis.call('SET', lock, owner, 'PX', ttl_ms)
    return granted((next_token('+')))
  end
  if holder == SHARED then
    unfold(fence, shares, leases)
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
local record = redis.call('GET', fence)
local last, sign, of = string.match(record or '', '^(%d+)(.?)(%S*)')
local foreign = not offered and holder ~= SHARED and of ~= holder
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
  -- First, so that there is no queue without it, whatever fails.
  if sign == ' ' then
    redis.call('SET', fence, last .. '+' .. string.sub(record, #last + 2), 'KEEPTTL')
  end
  local entry = owner .. ' ' .. waiter
  if not redis.call('LPOS', queue, entry) then
    local length = redis.call(first_again and 'LPUSH' or 'RPUSH', queue, entry)
    if length % 16 == 0 then
      -- Entries of dead clients remain until it is their turn: do not let them pile up behind a long lease.
      for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
        local of, channel = string.match(other, '^(%S+) %S+ (.+)$')
        if not listens(channel) then
          redis.call('LREM', queue, 1, other)
          send(channel, of)  -- to a client at another node of the Cluster, which looks again
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
