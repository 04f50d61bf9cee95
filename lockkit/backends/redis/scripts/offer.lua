-- Shared by other scripts: offers a lock to the first waiter whose client is alive.
--
-- queue is a list of "OWNER GRACE_MS CHANNEL", in order of arrival.
-- A client is subscribed to CHANNEL as long as it lives, so a channel without subscribers means that it is gone.
-- During an offer, the lock's value is "next:OWNER" for GRACE_MS: no other client can take it, not even one of another
-- kind; and no client holds it, so that a release or a renewal by OWNER does not affect it.
-- The next waiter is notified by "OWNER GRACE_MS": retry after that time, because the first client may be stopped.
-- Returns the owner to whom it was offered (or `me`, which needs no message), or nil if there is no waiter.
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
