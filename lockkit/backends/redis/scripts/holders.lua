-- Returns the holder of a lock.
--
-- KEYS  1 lock   2 fence   3 meta   4 queue
-- Returns {} if it is free, else {owner, ttl_ms left (-1: for ever), token ("" if unknown), metadata, waiters}.
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return redis.error_reply('WRONGTYPE the key ' .. KEYS[1] .. ' holds no string')
end
if not holder or string.sub(holder, 1, 5) == 'next:' then
  return {}
end
local token, metadata, waiters = '', '', 0
local meta = redis.call('GET', KEYS[3])
if meta and string.sub(meta, 1, #holder + 1) == holder .. ' ' then
  metadata = string.sub(meta, #holder + 2)
  token = redis.call('GET', KEYS[2]) or ''
end
for _, entry in ipairs(redis.call('LRANGE', KEYS[4], 0, -1)) do
  local channel = string.match(entry, '^%S+ %d+ (.+)$')
  if channel and redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then
    waiters = waiters + 1
  end
end
return {holder, redis.call('PTTL', KEYS[1]), token, metadata, waiters}
