-- Tells which commands the user of this connection may not run, without running them (Redis 7: redis.acl_check_cmd).
--
-- ARGV  for each command: how many words it has, then the words
-- Returns the indexes, from 1, of those that are refused; or -1 if this server cannot tell.
if not redis.acl_check_cmd then
  return -1
end
local refused, at, index = {}, 1, 0
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  index = index + 1
  if not redis.acl_check_cmd(unpack(ARGV, at + 1, at + count)) then
    refused[#refused + 1] = index
  end
  at = at + 1 + count
end
return refused
