-- Shared by scripts below: tells the first waiter that lives that a lock has become free here.
--
-- queue is a list of "OWNER 0 CHANNEL", first come first. A client listens on CHANNEL as long as it lives.
-- Nothing is kept for the waiter: one node cannot know whether the majority is free.
local function tell(queue)
  local entry = redis.call('LPOP', queue)
  while entry do
    local owner, channel = string.match(entry, '^(%S+) 0 (.+)$')
    if owner and redis.call('PUBLISH', channel, owner) > 0 then
      return
    end
    entry = redis.call('LPOP', queue)
  end
end
