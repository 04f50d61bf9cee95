-- Returns the server's time: {seconds, microseconds}.
--
-- KEYS  1 any of the node
return redis.call('TIME')
