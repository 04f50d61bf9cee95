-- Returns whether this node may vote.
--
-- KEYS  1 mark (see admit.lua)
-- ARGV  1 run id of the server as told on this connection, "" if unknown
-- Returns {state, wait_ms, ttl_ms, age_ms, run id}: state 0 no mark, 1 marked, 2 marked by an earlier run of this
--   server; wait_ms until it votes (0: now); ttl_ms the longest ttl that it has seen; age_ms since the mark was written.
local mark = redis.call('MGET', KEYS[1])[1] or ''
local run, longest_ms, since_us, until_us = string.match(mark, '^(%S+) (%d+) (%d+) (%d+)')
if not run then
  return {0, 0, 0, 0, ARGV[1]}
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local same = ARGV[1] == '' or run == ARGV[1]
local wait_ms = math.max(0, math.ceil((until_us - now_us) / 1000))
return {same and 1 or 2, wait_ms, tonumber(longest_ms), math.floor((now_us - since_us) / 1000), ARGV[1]}
