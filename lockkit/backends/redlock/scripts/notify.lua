-- Shared by other scripts: notifies the first waiter whose client is alive that a lock has become free on this node.
--
-- queue is a list of "OWNER 0 CHANNEL", in order of arrival. A client is subscribed to CHANNEL as long as it lives.
-- Nothing is reserved for the waiter: one node cannot know whether the majority is free. The next waiter is notified by
-- "OWNER MILLISECONDS": retry after that time, because the first client may be stopped.
-- A user who may not PUBLISH notifies nobody: its waiters poll.
local function notify(queue)
  local entry = redis.call('LPOP', queue)
  while entry do
    local owner, channel = string.match(entry, '^(%S+) 0 (.+)$')
    local count = owner and redis.pcall('PUBLISH', channel, owner)
    if type(count) == 'number' and count > 0 then
      local behind, its_channel = string.match(redis.call('LRANGE', queue, 0, 0)[1] or '', '^(%S+) 0 (.+)$')
      if behind then
        redis.pcall('PUBLISH', its_channel, behind .. ' 500')
      end
      return
    end
    entry = redis.call('LPOP', queue)
  end
end
