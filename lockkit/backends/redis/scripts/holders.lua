-- Returns the holders of a lock.
--
-- KEYS  1 lock   2 fence   3 meta   4 queue   5 shares   6 leases (neither where a lock has no shares; see shares.lua)
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
for _, entry in ipairs(redis.call('LRANGE', KEYS[4], 0, -1)) do
  local channel = string.match(entry, '^%S+ %S+ (.+)$')
  if channel and redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then
    waiters = waiters + 1
  end
end
local meta = redis.call('GET', KEYS[3])
if KEYS[5] and holder == SHARED then
  local owner, number, _, lease = string.match(meta or '', '^shared (%S+) (%S+) (%d+) (.*)$')
  if owner then
    return {waiters, {owner, redis.call('PTTL', KEYS[1]), lease, number == '-' and '' or number}}
  end
  local reply = {waiters}
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local entries = redis.call('ZRANGEBYSCORE', KEYS[5], string.format('%.0f', now_ms), '+inf', 'WITHSCORES')
  for i = 1, #entries, 2 do
    local lease = redis.call('HGET', KEYS[6], entries[i])
    if lease then
      local number = redis.call('ZSCORE', KEYS[5], '#' .. entries[i])
      reply[#reply + 1] = {entries[i], entries[i + 1] - now_ms, lease, number and tostring(-1 - number) or ''}
    end
  end
  return reply
end
local token, metadata = '', ''
if meta and string.sub(meta, 1, #holder + 1) == holder .. ' ' then
  metadata = string.sub(meta, #holder + 2)
  token = redis.call('GET', KEYS[2]) or ''
end
return {holder, redis.call('PTTL', KEYS[1]), token, metadata, waiters}
