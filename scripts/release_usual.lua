-- The usual cases of release: a writer lets go and nobody waits, or another
-- writer is next. It does what the long way does, in fewer calls and with fewer
-- conversions of numbers, which cost as much; whatever is unusual goes the long way.
--
-- KEYS, ARGV  as of release.lua
-- Returns how many were made owner.

local call = redis.call
if call('GET', KEYS[1]) == ARGV[2] and string.sub(ARGV[2], 9, 9) == 'w' then
  local waiting = call('LLEN', KEYS[2])
  if waiting == 0 then
    if ARGV[3] == '0' then
      call('DEL', KEYS[1])
      return 0
    end
  else
    local id = call('LINDEX', KEYS[2], 0)
    local ttl, proof, client = string.match(id, '^leased1:w:([1-9]%d*):([cu])i?:[%w_-]+:(%S+)$')
    local m = call('GET', KEYS[5])
    if ttl and #ttl <= 9 and m then
      local t = call('TIME')
      local s = t[1] .. string.rep('0', 6 - #t[2]) .. t[2]
      local left = (tonumber(call('ZSCORE', KEYS[4], id) or 0) or 0) - s / 1000
      if left > 0 and left - ttl <= 0 and ARGV[3] - s < 0
        and #m == 9 + 2 * #s and string.sub(m, 1, 8) == 'leased1:' and string.sub(m, 9 + #s, 9 + #s) == ':'
        and string.sub(m, 9, 8 + #s) < s then -- as many digits: they compare like numbers
        call('LPOP', KEYS[2])
        call('ZREM', KEYS[4], id)
        call('SET', KEYS[1], id, 'PX', ttl)
        call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
        local n = redis.pcall('PUBLISH', ARGV[1] .. client, 'leased1:granted ' .. s .. ' ' .. s .. ' '
          .. (waiting > 1 and '1' or '0') .. ' ' .. ARGV[4] .. ' ' .. id .. ' ' .. KEYS[1])
        if n ~= 0 or proof == 'u' then return 1 end
        call('SET', KEYS[1], ARGV[2], 'PX', ttl) -- nobody listens: the next one, the long way
      end
    end
  end
end
