-- Marks a node that has no mark of its present run, and sets when it may vote.
--
-- The mark is a hash without expiry: run (id of the server's process), ttl_ms (longest ttl seen), since_us (when it was
-- written) and until_us (no vote before that), both by this server's clock.
--
-- KEYS  1 mark
-- ARGV  1 wait_ms (before it votes)  2 ttl_ms (longest known)  3 run id, "" if unknown
-- Returns 1, or 0 if another client was faster: then its decision counts.
local mark, run = KEYS[1], ARGV[3]
local marked = redis.call('HMGET', mark, 'run', 'ttl_ms')
if marked[1] and (run == '' or marked[1] == run) then
  return 0
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
redis.call('HSET', mark,
  'run', run == '' and 'unknown' or run,
  'ttl_ms', string.format('%.0f', math.max(tonumber(marked[2] or 0), tonumber(ARGV[2]))),
  'since_us', string.format('%.0f', now_us),
  'until_us', string.format('%.0f', now_us + tonumber(ARGV[1]) * 1000))
return 1
