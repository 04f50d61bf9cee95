-- Runs an application's script unless the token is stale. `body`, a function of KEYS and ARGV, is defined above.
--
-- KEYS  1 mark (the newest token accepted)   2... the application's keys
-- ARGV  1 token   2 keep_ms (how long the mark is kept; "" means for ever)   3... the application's arguments
-- Returns what body returns; or the error STALETOKEN with the token in the mark, or BADMARK if the mark is no token.
local mark, token = KEYS[1], ARGV[1]
local last = redis.pcall('GET', mark)
if last and (type(last) == 'table' or not string.match(last, '^%d+$')) then
  return redis.error_reply('BADMARK')
end
-- Compared as text: Lua's numbers are doubles, which cannot distinguish all tokens above 2^53.
if last and (#last > #token or (#last == #token and last > token)) then
  return redis.error_reply('STALETOKEN ' .. last)
end
-- Before body: if it fails half-way, what it wrote until then stays and must be protected.
if ARGV[2] == '' then
  redis.call('SET', mark, token)
else
  redis.call('SET', mark, token, 'PX', ARGV[2])
end

-- unpack() would take only a few thousand values.
local function without(list, count)
  local rest = {}
  for i = count + 1, #list do
    rest[i - count] = list[i]
  end
  return rest
end
return body(without(KEYS, 1), without(ARGV, 2))
