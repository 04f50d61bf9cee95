-- Runs an application's script unless a newer holder was here. `body`, a function of KEYS and ARGV, stands above.
--
-- KEYS  1 mark (the newest token accepted)   2... the application's keys
-- ARGV  1 token   2 keep_ms (how long the mark is kept; "" for ever)   3... the application's arguments
-- Returns what body returns; error STALETOKEN with the token in the mark, or BADMARK if there is something else.
local mark, token = KEYS[1], ARGV[1]
local last = redis.pcall('GET', mark)
if last and (type(last) == 'table' or not string.match(last, '^%d+$')) then
  return redis.error_reply('BADMARK')
end
-- As text: Lua's numbers are doubles, which do not tell tokens above 2^53 apart.
if last and (#last > #token or (#last == #token and last > token)) then
  return redis.error_reply('STALETOKEN ' .. last)
end
-- Before body: if it fails half-way, what it wrote until then stays and must be protected.
if ARGV[2] == '' then
  redis.call('SET', mark, token)
else
  redis.call('SET', mark, token, 'PX', ARGV[2])
end

-- Not unpack(): it takes a few thousand values only.
local function without(list, count)
  local rest = {}
  for i = count + 1, #list do
    rest[i - count] = list[i]
  end
  return rest
end
return body(without(KEYS, 1), without(ARGV, 2))
