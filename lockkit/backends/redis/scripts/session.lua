-- Keeps a session for another ttl, and takes leases into it, or out of it.
--
-- A session is a key that lives as long as its client renews it. The key of a lock whose lease is in it has the value
-- "lockkit:session NUMBER OWNER KEY", with KEY that of the session: it is held as long as both keys are there. A lease
-- that has left has no KEY, and ends with its own key. NUMBER grows with each request for a lease: one that arrives
-- late, after its client has given it up and sent another, changes nothing.
-- The session's value is the owners of the leases in it that were ended by force: "OWNER OWNER ".
--
-- KEYS  1 session (the keys of the locks follow in ARGV: only a server that is no Cluster has sessions)
-- ARGV  1 ttl_ms  2 "1" to make the session  3 from which byte on its value is new to the client
--       4 keep_ms (life of the locks' keys)  5 fence_ms  6 channel of all clients (for a lock that has vanished)
--       7 JSON: leases that come in: [LOCK, OWNER, NUMBER, ...]
--       8 JSON: leases that go out: [LOCK, OWNER, NUMBER, LEFT_MS, ...]
-- Returns {0} if the session has ended, else {1, identity of the server's data ("" if unknown), what is new of the
-- value, result of each lease that comes in..., result of each that goes out...}: 1 if done, 0 if the lock is free, -1
-- if another owner holds it, -2 if it was freed by force, -3 if a later request has come first, -4 if the lease has
-- ended with its session, 2 if it is a reader's now.
local session = KEYS[1]
-- With the functions of holder.lua:

-- First, because a server that is out of memory refuses a script whose first write adds data.
if redis.call('PEXPIRE', session, ARGV[1]) == 0 then
  if ARGV[2] ~= '1' then
    return {0}
  end
  redis.call('SET', session, '', 'PX', ARGV[1])
end

local function move(lock, owner, number, to, ms)
  local value = redis.pcall('GET', lock)
  if value ~= owner then
    local of, from = session_of(value)
    if of ~= owner then
      local broken = redis.pcall('GET', '{' .. lock .. '}:broken')
      if type(broken) == 'string' and string.find(' ' .. broken .. ' ', ' ' .. owner .. ' ', 1, true) then
        return -2
      end
      if not value then
        redis.pcall('PUBLISH', ARGV[6], lock)
        return 0
      end
      return value == SHARED and 2 or -1
    end
    if tonumber(string.match(value, '^%S+ (%d+)')) > number then
      return -3
    end
    if from ~= '' and from ~= session and redis.call('EXISTS', from) == 0 then
      return -4
    end
  end
  redis.call('SET', lock, string.format('lockkit:session %.0f %s %s', number, owner, to), 'PX', string.format('%.0f', ms))
  redis.call('PEXPIRE', '{' .. lock .. '}:fence', ARGV[5])
  return 1
end

-- Another run of the server, or a promoted replica, may lack leases that were granted, and still have the session.
local function identity()
  local server, replication = redis.pcall('INFO', 'server'), redis.pcall('INFO', 'replication')
  if type(server) ~= 'string' or type(replication) ~= 'string' then
    return ''
  end
  local run, data = string.match(server, 'run_id:(%w+)'), string.match(replication, 'master_replid:(%w+)')
  return run and data and run .. data or ''
end

local reply = {1, identity(), string.sub(redis.call('GET', session), ARGV[3] + 1)}
local coming, going = cjson.decode(ARGV[7]), cjson.decode(ARGV[8])
for i = 1, #coming, 3 do
  reply[#reply + 1] = move(coming[i], coming[i + 1], coming[i + 2], session, ARGV[4])
end
for i = 1, #going, 4 do
  reply[#reply + 1] = move(going[i], going[i + 1], going[i + 2], '', going[i + 3])
end
return reply
