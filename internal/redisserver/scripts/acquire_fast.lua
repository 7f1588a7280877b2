-- The common case of acquire in fewer calls: a writer takes a free lock for which nothing
-- waits. In any other case it writes nothing, and acquire.lua follows.
--
-- KEYS, ARGV  as in acquire.lua
-- Returns the token, which is also the server's time.
--
-- It runs before common.lua, so it repeats how that file writes the clock, the token and
-- its TTL. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

-- mode: the byte after 'leased1:'
if string.sub(ARGV[2], 9, 9) == 'w' and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) == 0 then
  local m = redis.call('GET', KEYS[5])
  local t = redis.call('TIME')
  local micros = tostring(t[2]) -- Dragonfly's are integers
  local s = t[1] .. (#micros == 6 and '' or string.rep('0', 6 - #micros)) .. micros
  local last = m and string.match(m, '^leased1:(%d+):')
  if not m or last and #last == #s and last < s then -- equally long digits compare like numbers
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[5])
    redis.call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', ARGV[6])
    return tonumber(s)
  end
end
