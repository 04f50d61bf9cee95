-- Shared by the scripts below: offers a lock to the first waiter that lives.
--
-- queue is a list of "OWNER GRACE_MS CHANNEL", first come first.
-- A client listens on CHANNEL as long as it lives, so a waiter whose channel nobody listens on is gone.
-- While it is offered, the lock's value is "next:OWNER" for GRACE_MS: nobody else can take it, not even a client of
-- another kind; and it is nobody's, so that a release or a renewal by OWNER does not touch it.
-- Returns whom it was offered to (or `me`, who need not be told), or nil when nobody waits.
local function offer(lock, queue, me)
  local entry = redis.call('LPOP', queue)
  while entry do
    local owner, grace_ms, channel = string.match(entry, '^(%S+) (%d+) (.+)$')
    if owner == me then
      return me
    end
    if owner and redis.call('PUBLISH', channel, owner) > 0 then
      redis.call('SET', lock, 'next:' .. owner, 'PX', grace_ms)
      return owner
    end
    entry = redis.call('LPOP', queue)
  end
end
