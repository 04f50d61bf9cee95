-- Marks a node that has no mark of its present run, and sets when it may vote.
--
-- What follows the fields below is of a later version of lockkit, which is kept.
-- The mark is a string without expiry, "RUN TTL_MS SINCE_US UNTIL_US": the id of the server's process, the longest ttl
-- seen, when it was written and when the node votes (not before that), both by this server's clock. A string, so that one
-- MGET reads it with the record of a lock.
--
-- KEYS  1 mark
-- ARGV  1 wait_ms (before it votes)  2 ttl_ms (longest known)  3 run id of the server that was looked at, "" if any will
--   do  4 run id, "" if unknown
-- Returns 1, or 0 if another client was faster: then its decision counts. 0 too if the server has restarted since it was
-- looked at: what was decided of the former one is not true of this one.
local mark, run = redis.call('MGET', KEYS[1])[1] or '', ARGV[4]
if ARGV[3] ~= '' and ARGV[3] ~= run then
  return 0
end
local marked_run, longest_ms = string.match(mark, '^(%S+) (%d+) %d+ %d+')
if marked_run and (run == '' or marked_run == run) then
  return 0
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
redis.call('SET', KEYS[1], string.format('%s %.0f %.0f %.0f',
  run == '' and 'unknown' or run,
  math.max(tonumber(longest_ms or 0), tonumber(ARGV[2])),
  now_us,
  now_us + tonumber(ARGV[1]) * 1000))
return 1
