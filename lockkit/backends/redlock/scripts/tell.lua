-- Shared by scripts below: tells the first waiter that lives that a lock has become free here.
--
-- queue is a list of "OWNER 0 CHANNEL", first come first. A client listens on CHANNEL as long as it lives.
-- Nothing is kept for the waiter: one node cannot know whether the majority is free. The one behind it is told
-- "OWNER MILLISECONDS": look again after that time, because the first may be stopped.
local function tell(queue)
  local entry = redis.call('LPOP', queue)
  while entry do
    local owner, channel = string.match(entry, '^(%S+) 0 (.+)$')
    if owner and redis.call('PUBLISH', channel, owner) > 0 then
      local behind, its_channel = string.match(redis.call('LRANGE', queue, 0, 0)[1] or '', '^(%S+) 0 (.+)$')
      if behind then
        redis.call('PUBLISH', its_channel, behind .. ' 500')
      end
      return
    end
    entry = redis.call('LPOP', queue)
  end
end
