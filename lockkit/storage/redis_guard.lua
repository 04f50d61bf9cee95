-- Runs an application's script unless the token is stale. `body`, a function of KEYS and ARGV, is defined above.
--
-- A writer is refused if a newer writer was accepted, or a reader with the same token (the lease was downgraded) or a
-- newer one; a reader, if a newer writer was.
--
-- KEYS  1 mark (the newest token of a writer)   2 mark of readers   3... the application's keys
-- ARGV  1 token   2 keep_ms (how long a mark is kept; "" means for ever)   3 "r" for a reader, "w" for a writer
--       4... the application's arguments
-- Returns what body returns; or the error STALETOKEN with the token in the mark, or BADMARK if a mark is no token.
local token, reader = ARGV[1], ARGV[3] == 'r'
local written, read = redis.pcall('GET', KEYS[1]), redis.pcall('GET', KEYS[2])
for _, last in ipairs({written or '0', read or '0'}) do
  if type(last) == 'table' or not string.match(last, '^%d+$') then
    return redis.error_reply('BADMARK')
  end
end
-- Compared as text: Lua's numbers are doubles, which cannot distinguish all tokens above 2^53.
local function newer(one, other)
  return #one > #other or (#one == #other and one > other)
end
if written and newer(written, token) then
  return redis.error_reply('STALETOKEN ' .. written)
end
if not reader and read and not newer(token, read) then
  return redis.error_reply('STALETOKEN ' .. read)
end
local mark = KEYS[1]
if reader then
  mark = KEYS[2]
  token = read and newer(read, token) and read or token
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
return body(without(KEYS, 2), without(ARGV, 3))
