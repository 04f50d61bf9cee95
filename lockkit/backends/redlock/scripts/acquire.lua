-- Round one on one node: takes the lock there and returns its highest token, if this node may vote.
--
-- KEYS  1 lock   2 fence (the last token)   3 meta ("VALUE METADATA")   4 queue (see notify.lua)
--       5 mark (see admit.lua)
-- ARGV  1 value (one per attempt)  2 ttl_ms  3 metadata (JSON)
--       4 entry for the queue: "OWNER 0 CHANNEL", or "" not to wait
--       5 run id of the server as told on this connection, "" if unknown
-- Returns max(last token, server time in µs) when taken, otherwise
--   {0, ttl_ms left (-1: for ever), value of the holder, 1 if foreign}
--   {-1}           no vote: the server lost its data or was restarted, and no client has decided when it votes again
--   {-2, wait_ms}  no vote for that time, for the same reason
local lock, fence, meta, queue, mark = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local value, ttl_ms, entry, run = ARGV[1], ARGV[2], ARGV[4], ARGV[5]

-- In the same atomic step as the vote: a mark that was read before could be gone by now (FLUSHALL).
local marked = redis.call('HMGET', mark, 'run', 'until_us', 'ttl_ms')
if not marked[1] or (run ~= '' and marked[1] ~= run) then
  return {-1}
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local wait_us = tonumber(marked[2]) - now_us
if wait_us > 0 then
  return {-2, math.ceil(wait_us / 1000)}
end

if redis.call('SET', lock, value, 'NX', 'PX', ttl_ms) then
  -- Before the grant counts: a node that loses its data must wait for the longest lease that it may have known.
  if tonumber(marked[3]) < tonumber(ttl_ms) then
    redis.call('HSET', mark, 'ttl_ms', ttl_ms)
  end
  redis.call('PSETEX', meta, ttl_ms, value .. ' ' .. ARGV[3])
  if entry ~= '' then
    redis.call('LREM', queue, 1, entry)
  end
  local last = tonumber(redis.call('GET', fence) or 0)
  return math.max(last, now_us)
end

local holder = redis.pcall('GET', lock)
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
end
local left_ms = redis.call('PTTL', lock)
if entry ~= '' then
  if not redis.call('LPOS', queue, entry) then
    local length = redis.call('RPUSH', queue, entry)
    if length % 16 == 0 then
      -- Entries of dead clients remain until it is their turn: do not let them pile up behind a long lease.
      for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
        local channel = string.match(other, '^%S+ 0 (.+)$')
        if not channel or redis.call('PUBSUB', 'NUMSUB', channel)[2] == 0 then
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
local foreign = redis.call('GETRANGE', meta, 0, #holder - 1) ~= holder
return {0, left_ms, holder, foreign and 1 or 0}
