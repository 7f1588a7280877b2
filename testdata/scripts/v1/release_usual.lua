-- The usual cases of release: a writer lets go and nobody waits, or another
-- writer is next. It does what the long way does, in fewer calls and with fewer
-- conversions of numbers, which cost as much; whatever is unusual goes the long way.
--
-- KEYS, ARGV  as of release.lua
-- Returns how many were made owner.

local call, pcall = redis.call, redis.pcall
local waiting = call('ZCARD', KEYS[2])
if call('GET', KEYS[1]) ~= ARGV[2] or string.sub(ARGV[2], 9, 9) ~= 'w' then -- the long way
elseif waiting == 0 then
  if ARGV[3] == '0' then
    call('DEL', KEYS[1])
    return 0
  end
else
  local id = call('ZRANGE', KEYS[2], '0', '0')[1]
  local ttl, proof, client = string.match(id, '^leased1:w:([1-9]%d*):([cu])i?:[%w_-]+:(%S+)$')
  local last = string.match(call('GET', KEYS[5]) or '', '^leased1:(%d+):')
  if last and ttl and #ttl <= 9 then
    local t = call('TIME')
    local s = t[1] .. (#t[2] == 6 and '' or string.rep('0', 6 - #t[2])) .. t[2]
    local left = (tonumber(call('ZSCORE', KEYS[4], id) or 0) or 0) - s / 1000
    if left > 0 and left - ttl <= 0
      and #last == #s and last < s -- as many digits: they compare like numbers
      and (ARGV[3] == '0' or #ARGV[3] == #s and ARGV[3] < s)
      and (proof == 'u' or pcall('PUBSUB', 'NUMSUB', ARGV[1] .. client)[2] ~= 0) then
      call('ZREM', KEYS[2], id)
      call('ZREM', KEYS[4], id)
      call('SET', KEYS[1], id, 'PX', ttl)
      call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
      pcall('PUBLISH', ARGV[1] .. client, 'leased1:granted ' .. s .. ' ' .. s .. ' '
        .. (waiting > 1 and '1' or '0') .. ' ' .. ARGV[4] .. ' ' .. id .. ' ' .. KEYS[1])
      return 1
    end
  end
end
