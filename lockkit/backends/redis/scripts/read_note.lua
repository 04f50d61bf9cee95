-- Returns the note on a lock.
--
-- KEYS  1 note
-- Returns {} if there is none, else {text, ms left}.
local text = redis.call('GET', KEYS[1])
if not text then
  return {}
end
return {text, redis.call('PTTL', KEYS[1])}
