-- Shared by other scripts: who holds a lock, if its lease may be in a session (see session.lua).

-- Takes the value of a lock's key apart. Returns the owner and the key of the session ("" for none); nothing for the
-- value of any other lease.
local function session_of(value)
  if type(value) == 'string' and string.sub(value, 1, 16) == 'lockkit:session ' then
    return string.match(value, '^%S+ %d+ (%S+) (.*)$')
  end
end

-- Returns the value of a lock's key; of a lease in a session, its owner and the key of the session, or false instead of
-- the owner if the session has ended: then nobody holds the lock.
local function look(lock)
  local value = redis.pcall('GET', lock)
  local owner, session = session_of(value)
  if not owner then
    return value
  end
  return (session == '' or redis.call('EXISTS', session) == 1) and owner, session
end

-- Returns in how many ms a lease ends that is in this session, or in none (-1: never).
local function lease_left(lock, session)
  local left_ms = redis.call('PTTL', lock)
  if session and session ~= '' then
    local session_ms = redis.call('PTTL', session)
    return (left_ms < 0 or session_ms < left_ms) and session_ms or left_ms
  end
  return left_ms
end
