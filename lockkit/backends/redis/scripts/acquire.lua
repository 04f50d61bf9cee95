-- Takes a lock, or enters its queue.
--
-- KEYS  1 lock   2 fence (the last token)   3 meta ("OWNER METADATA")   4 queue (see offer.lua)
-- ARGV  1 owner  2 ttl_ms  3 metadata (JSON)  4 fence_ms (how long the counter is kept)
--       5 entry for the queue without the owner: "GRACE_MS CHANNEL", or "" not to wait
-- Returns the token if granted, otherwise {ttl_ms left (-1: for ever), owner ("" if only offered), 1 if foreign}.
local lock, fence, meta, queue = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, ttl_ms, waiter = ARGV[1], ARGV[2], ARGV[5]

local function grant()
  local time = redis.call('TIME')
  -- A string: strings of equally many digits compare as numbers do, and Lua would write the number as 1.7e+15.
  local token = time[1] .. string.sub('00000' .. time[2], -6)
  local last = redis.call('GET', fence)
  if last and (#last > #token or (#last == #token and last >= token)) then
    token = string.format('%.0f', tonumber(last) + 1)
  end
  redis.call('PSETEX', fence, ARGV[4], token)
  redis.call('PSETEX', meta, ttl_ms, owner .. ' ' .. ARGV[3])
  return tonumber(token)
end

local holder
if redis.call('SET', lock, owner, 'NX', 'PX', ttl_ms) then
  if redis.call('EXISTS', queue) == 0 then
    return grant()
  end
  -- The lock expired or a foreign client freed it, so nothing notified the waiters: they come first.
  holder = offer(lock, queue, owner)
  if holder == nil or holder == owner then
    return grant()
  end
  holder = 'next:' .. holder
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
end

local offered = string.sub(holder, 1, 5) == 'next:'
local foreign = not offered and redis.call('GETRANGE', meta, 0, #holder - 1) ~= holder
local left_ms = redis.call('PTTL', lock)

if waiter ~= '' then
  local entry = owner .. ' ' .. waiter
  if not redis.call('LPOS', queue, entry) then
    local length = redis.call('RPUSH', queue, entry)
    if length % 16 == 0 then
      -- Entries of dead clients remain until it is their turn: do not let them pile up behind a long lease.
      for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
        local channel = string.match(other, '^%S+ %d+ (.+)$')
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
return {left_ms, offered and '' or holder, foreign and 1 or 0}
