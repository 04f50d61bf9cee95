-- Shared by other scripts, after shares.lua: offers a lock to the first waiters whose clients are alive.
--
-- queue is a list of "OWNER GRACE_MS CHANNEL", in order of arrival. GRACE_MS is followed by "+0" for a reader, and by
-- "+LIMIT" for a permit: it fits beside fewer than LIMIT others.
-- A client is subscribed to CHANNEL as long as it lives, so a channel without subscribers means that it is gone.
-- During an offer, the lock's value is "next:OWNER" for GRACE_MS: no other client can take it, not even one of another
-- kind; and no client holds it, so that a release or a renewal by OWNER does not affect it. An offer to a reader or
-- permit is an entry of its own in `shares`, for GRACE_MS.
-- The next waiter is notified by "OWNER GRACE_MS": retry after that time, because the first client may be stopped.

-- Tells whether the client of a channel is there; also if the user may not ask.
local function listens(channel)
  local reply = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return reply.err ~= nil or reply[2] > 0
end

-- Sends a message to the client of a channel. Returns 0 if it is not at this node, or if the user may not PUBLISH.
local function send(channel, text)
  local count = redis.pcall('PUBLISH', channel, text)
  return type(count) == 'number' and count or 0
end

-- Has a waiter retry after a time.
local function notify(entry, ms)
  local owner, channel = string.match(entry, '^(%S+) %S+ (.+)$')
  if owner then
    send(channel, owner .. ' ' .. ms)
  end
end

-- Offers a lock that nobody holds, or places beside its `count` shares; `entry` has left the queue already.
-- Returns the lock's new value (or `me`, which needs no message and takes the lock itself), nil if nothing was offered;
-- and the entry of the waiter that has to wait beside the shares.
local function offer(lock, queue, shares, me, count, entry)
  local longest_ms, following
  count = count or 0
  while true do
    if count > 0 then
      entry = side('LRANGE', queue, 0, 0)[1]
    else
      entry = entry or side('LPOP', queue)
    end
    if type(entry) ~= 'string' then
      break
    end
    local owner, grace_ms, limit, channel = string.match(entry, '^(%S+) (%d+)%+?(%d*) (.+)$')
    local fits = count == 0 or limit == '0' or count < (tonumber(limit) or 0)
    if not fits and owner and listens(channel) then
      following = entry
      break
    end
    if count > 0 then
      side('LPOP', queue)
    end
    if fits and owner == me then
      if limit == '' then
        return me
      end
    elseif not owner or send(channel, owner) == 0 or not fits then
      -- Its client is gone; or at another node of the Cluster, where this slot was, and the message has it look again.
      owner = nil
    elseif limit == '' then
      redis.call('SET', lock, 'next:' .. owner, 'PX', grace_ms)
      following = side('LRANGE', queue, 0, 0)[1]
      if type(following) == 'string' then
        notify(following, grace_ms)
      end
      return 'next:' .. owner
    end
    if owner then
      if count == 0 then
        redis.call('SET', lock, SHARED, 'PX', grace_ms)
      end
      side('ZADD', shares, digits(now_ms() + grace_ms), owner)
      count, longest_ms = count + 1, math.max(longest_ms or 0, grace_ms)
    end
    entry = nil
  end
  if not longest_ms then
    return nil, following
  end
  keep(shares, lock)
  if following then
    notify(following, digits(longest_ms))
  end
  return SHARED, following
end

-- After one of the shares of a lock has ended early: offers its place, or frees the lock after the last one.
local function advance(lock, queue, shares, leases)
  prune(shares, leases)
  local count = count_shares(shares)
  if count == 0 then
    if not offer(lock, queue, shares) then
      redis.call('DEL', lock)
      side('DEL', shares)
      side('DEL', leases)
    end
    return
  end
  local before_ms = redis.call('PTTL', lock)
  local offered, head = offer(lock, queue, shares, nil, count)
  local left_ms = keep(shares, lock, leases)
  if head and not offered and left_ms < before_ms then
    notify(head, digits(left_ms))
  end
end
