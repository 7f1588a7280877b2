-- The common cases of release in fewer calls, and with fewer conversions of numbers, which
-- cost as much: a writer gives the lock back, and nothing waits or a live writer is next.
-- In any other case, a cool-down too, it writes nothing, and release.lua follows, or cancel.lua.
--
-- KEYS, ARGV  as in release.lua
-- Returns how many were made owner.
--
-- It runs before common.lua, so it repeats how that file writes the clock, the token and
-- its TTL (which depends on the next owner's, so the client cannot pass it), and the
-- granted message of grant_next. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

local call, pcall = redis.call, redis.pcall
local queue = call('ZRANGE', KEYS[2], '0', '1')
local id = queue[1]
local both = (id or ARGV[3] ~= '0') and call('MGET', KEYS[1], KEYS[5]) or call('MGET', KEYS[1]) -- no error for another type
-- mode: the byte after 'leased1:'
if both[1] ~= ARGV[2] or string.sub(ARGV[2], 9, 9) ~= 'w' or ARGV[5] then -- release.lua follows
elseif not id then
  if ARGV[3] == '0' then
    call('DEL', KEYS[1])
    return 0
  end
  local ttl = string.match(ARGV[2], '^leased1:w:([1-9]%d*):')
  local last = string.match(both[2] or '', '^leased1:(%d+):')
  -- equally long digits compare like numbers
  if last and #last == 16 and #ARGV[3] == 16 and last >= ARGV[3] and last < '9007199254740000' then -- nothing to remember
    call('DEL', KEYS[1])
    return 0
  end
  local t = call('TIME')
  local us = t[1] * 1000000 + t[2]
  -- a token ahead of the clock is kept for longer
  if ttl and #ttl <= 9 and last and #last == 16 and #ARGV[3] == 16 and us - ARGV[3] > 0 then
    call('DEL', KEYS[1])
    call('SET', KEYS[5], string.format('leased1:%s:%.0f:%s', ARGV[3], us, ARGV[2]),
      'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
    return 0
  end
else
  local ttl, proof, client = string.match(id, '^leased1:w:([1-9]%d*):([cpu])i?:[%w_-]+:(%S+)$')
  local last = string.match(both[2] or '', '^leased1:(%d+):')
  if last and ttl and #ttl <= 9 then
    local t = call('TIME')
    local micros = tostring(t[2]) -- Dragonfly's are integers
    local s = t[1] .. (#micros == 6 and '' or string.rep('0', 6 - #micros)) .. micros
    local left = (tonumber(call('ZSCORE', KEYS[4], id) or 0) or 0) - s / 1000
    if left > 0 and left - ttl <= 0
      and #last == #s and last < s -- equally long digits compare like numbers
      and (ARGV[3] == '0' or #ARGV[3] == #s and ARGV[3] < s)
      and (proof ~= 'c' or pcall('PUBSUB', 'NUMSUB', ARGV[1] .. client)[2] ~= 0) then
      call('ZREM', KEYS[2], id)
      call('ZREM', KEYS[4], id)
      call('SET', KEYS[1], id, 'PX', proof == 'p' and ttl - 2000 > 0 and '2000' or ttl) -- PROVISIONAL of common.lua
      call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
      pcall('PUBLISH', ARGV[1] .. client, 'leased1:granted ' .. s .. ' ' .. s .. ' '
        .. (queue[2] and '1' or '0') .. ' ' .. ARGV[4] .. ' ' .. id .. ' ' .. KEYS[1])
      return 1
    end
  end
end
