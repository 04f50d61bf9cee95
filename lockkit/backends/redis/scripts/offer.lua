-- Shared by the scripts below: offers a lock to the first waiter that lives.
--
-- queue is a list of "OWNER GRACE_MS CHANNEL", first come first.
-- A client listens on CHANNEL as long as it lives, so a waiter whose channel nobody listens on is gone.
-- While it is offered, the lock's value is "next:OWNER" for GRACE_MS: nobody else can take it, not even a client of
-- another kind; and it is nobody's, so that a release or a renewal by OWNER does not touch it.
-- The waiter behind that one is told "OWNER GRACE_MS": look again when that time is over. The first may be stopped.
-- Returns whom it was offered to (or `me`, who need not be told), or nil when nobody waits.
local function offer(lock, queue, me)
  local entry = side('LPOP', queue)
  while type(entry) == 'string' do
    local owner, grace_ms, channel = string.match(entry, '^(%S+) (%d+) (.+)$')
    if owner == me then
      return me
    end
    if owner and redis.call('PUBLISH', channel, owner) > 0 then
      redis.call('SET', lock, 'next:' .. owner, 'PX', grace_ms)
      local following = side('LRANGE', queue, 0, 0)[1]
      if type(following) == 'string' then
        local behind, its_channel = string.match(following, '^(%S+) %d+ (.+)$')
        if behind then
          redis.call('PUBLISH', its_channel, behind .. ' ' .. grace_ms)
        end
      end
      return owner
    end
    entry = side('LPOP', queue)
  end
end
