-- Round one on one node: takes the lock there and returns its highest token, if this node may vote.
--
-- KEYS  1 lock   2 fence (the record of the last grant; see fence.lua)   3 queue (see notify.lua)   4 mark (see admit.lua)
-- ARGV  1 value (one per attempt)  2 ttl_ms  3 fence_ms (how long the record is kept)  4 metadata (JSON)
--       5 token that the client proposes to all nodes, or "" to write the lowest possible one
--       6 entry for the queue: "OWNER 0 CHANNEL", or "" not to wait
--       7 run id of the server as told on this connection, "" if unknown
-- Returns a token when taken: the proposed one, which it has then written; if this node cannot accept that, the lowest
-- possible one, max(last token + 1, server time in µs), which it has not written. Otherwise
--   {0, ttl_ms left (-1: for ever), value of the holder, 0 if its client is lockkit, 1 if not, 2 if that is not sure}
--   {-1}           no vote: the server lost its data or was restarted, and no client has decided when it votes again
--   {-2, wait_ms}  no vote for that time, for the same reason
local lock, fence, queue, mark = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local value, ttl_ms, entry, run = ARGV[1], ARGV[2], ARGV[6], ARGV[7]

-- How far a token may be ahead of this server's time (AHEAD_MS_MAX in delayed_restart.py). More: restarted nodes wait for
-- so much longer, so that tokens increase. Less: nodes whose clocks differ as they mostly do refuse what others accept.
local AHEAD_US_MAX = 10000

-- In the same atomic step as the vote: a mark that was read before could be gone by now (FLUSHALL).
local found = redis.call('MGET', mark, fence)
local marked_run, longest_ms, times, until_us, more = string.match(found[1] or '', '^(%S+) (%d+) (%d+ (%d+))(.*)$')
if not marked_run or (run ~= '' and marked_run ~= run) then
  return {-1}
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local wait_us = until_us - now_us
if wait_us > 0 then
  return {-2, math.ceil(wait_us / 1000)}
end
local record = found[2]
local last, sign = string.match(record or '', '^(%d+)(.?)')

if redis.call('SET', lock, value, 'NX', 'PX', ttl_ms) then
  -- Before the grant counts: a node that loses its data must wait for the longest lease that it may have known.
  if tonumber(longest_ms) < tonumber(ttl_ms) then
    redis.call('SET', mark, table.concat({marked_run, ttl_ms, times}, ' ') .. more)
  end
  if entry ~= '' then
    redis.call('LREM', queue, 1, entry)
  end
  local lowest = math.max(tonumber(last or 0) + 1, now_us)
  local token = tonumber(ARGV[5]) or lowest
  if token < lowest or token > math.max(lowest, now_us + AHEAD_US_MAX) then
    return lowest
  end
  if sign ~= ' ' then
    sign = redis.call('EXISTS', queue) == 0 and ' ' or '+'
  end
  redis.call('SET', fence, string.format('%.0f', token) .. sign .. value .. ' ' .. ARGV[4], 'PX', ARGV[3])
  return token
end

local holder = redis.pcall('GET', lock)
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. lock .. ' holds no string')
end
local left_ms = redis.call('PTTL', lock)
if entry ~= '' then
  -- First, so that there is no queue without it, whatever fails.
  if sign == ' ' then
    redis.call('SET', fence, last .. '+' .. string.sub(record, #last + 2), 'KEEPTTL')
  end
  if not redis.call('LPOS', queue, entry) then
    local length = redis.call('RPUSH', queue, entry)
    if length % 16 == 0 then
      -- Entries of dead clients remain until it is their turn: do not let them pile up behind a long lease.
      for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
        local channel = string.match(other, '^%S+ 0 (.+)$')
        local count = channel and redis.pcall('PUBSUB', 'NUMSUB', channel)
        if not count or count[2] == 0 then
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
-- The record of a lease that is being granted may not be written yet: then lockkit's values are told by their form,
-- which those of some other clients have, too.
local kind = 1
if string.match(record or '', '^%d+[ +](%S+)') == holder then
  kind = 0
elseif string.find(holder, '^' .. string.rep('%x', 32) .. '%.?%d*$') then
  kind = #holder > 32 and 0 or 2
end
return {0, left_ms, holder, kind}
