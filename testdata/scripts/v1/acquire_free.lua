-- The usual case of acquire: a writer, a free lock, nobody waits. It does what
-- the long way does, in fewer calls; whatever is unusual goes the long way.
--
-- KEYS, ARGV  as of acquire.lua
-- Returns the token, which is also the server's time.

if string.sub(ARGV[2], 9, 9) == 'w' and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) == 0 then
  local m = redis.call('GET', KEYS[5])
  local t = redis.call('TIME')
  local s = t[1] .. (#t[2] == 6 and '' or string.rep('0', 6 - #t[2])) .. t[2]
  local last = m and string.match(m, '^leased1:(%d+):')
  if not m or last and #last == #s and last < s then -- as many digits: they compare like numbers
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[5])
    redis.call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', ARGV[6])
    return tonumber(s)
  end
end
