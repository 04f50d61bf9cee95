-- Returns the holders of a lock.
--
-- KEYS  1 lock   2 fence (see acquire.lua)   3 queue   4 shares   5 leases (neither where a lock has no shares; see
--       shares.lua)
-- Returns {} if it is free, else {owner, ttl_ms left (-1: for ever), token ("" if unknown), metadata, waiters};
-- or {waiters, {owner, ttl_ms left, "TOKEN METADATA", number of the permit ("" for a reader)}, ...} if it has shares.
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. KEYS[1] .. ' holds no string')
end
if not holder or string.sub(holder, 1, 5) == 'next:' then
  return {}
end
local waiters = 0
for _, entry in ipairs(redis.call('LRANGE', KEYS[3], 0, -1)) do
  local channel = string.match(entry, '^%S+ %S+ (.+)$')
  local count = channel and redis.pcall('PUBSUB', 'NUMSUB', channel)
  if count and (count.err or count[2] > 0) then
    waiters = waiters + 1
  end
end
local record = redis.call('GET', KEYS[2]) or ''
if KEYS[4] and holder == SHARED then
  local reply = {waiters}
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local token, owner, number, ends, metadata =
    string.match(record, '^(%d+)[ +]' .. SHARED .. ' (%S+) (%S+) (%d+) (.*)$')
  if owner and tonumber(ends) >= now_ms then
    return {waiters, {owner, redis.call('PTTL', KEYS[1]), token .. ' ' .. metadata, number == '-' and '' or number}}
  end
  local entries = redis.call('ZRANGEBYSCORE', KEYS[4], string.format('%.0f', now_ms), '+inf', 'WITHSCORES')
  for i = 1, #entries, 2 do
    local lease = redis.call('HGET', KEYS[5], entries[i])
    if lease then
      local number = redis.call('ZSCORE', KEYS[4], '#' .. entries[i])
      reply[#reply + 1] = {entries[i], entries[i + 1] - now_ms, lease, number and tostring(-1 - number) or ''}
    end
  end
  return reply
end
local token, owner, metadata = string.match(record, '^(%d+)[ +](%S+) (.*)$')
if owner ~= holder then
  token, metadata = '', ''
end
return {holder, redis.call('PTTL', KEYS[1]), token, metadata, waiters}
