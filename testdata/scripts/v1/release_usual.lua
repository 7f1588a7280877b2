-- The usual cases of release: a writer lets go and nobody waits, or another
-- writer is next. It does what the long way does, in fewer calls; whatever is
-- unusual goes the long way.
--
-- KEYS, ARGV  as of release.lua
-- Returns how many were made owner.

if redis.call('GET', KEYS[1]) == ARGV[2] and string.sub(ARGV[2], 9, 9) == 'w' then
  local queue = redis.call('LRANGE', KEYS[2], 0, 1) -- the next, and whether others wait
  local id = queue[1]
  if not id then
    if ARGV[3] == '0' then
      redis.call('DEL', KEYS[1])
      return 0
    end
  else
    local ttl, proof, client = string.match(id, '^leased1:w:(%d+):([cu]):[%w_-]+:(%S+)$')
    local m = redis.call('GET', KEYS[5])
    local t = redis.call('TIME')
    local s = t[1] .. string.rep('0', 6 - #t[2]) .. t[2]
    local ends = ttl and #ttl <= 9 and tonumber(redis.call('ZSCORE', KEYS[4], id) or 0)
    local now = math.floor(tonumber(s) / 1000)
    if ends and ends > now and ends - now <= tonumber(ttl) and #ARGV[3] <= #s and (#ARGV[3] < #s or ARGV[3] < s)
      and m and #m == 9 + 2 * #s and string.sub(m, 1, 8) == 'leased1:' and string.sub(m, 9 + #s, 9 + #s) == ':'
      and string.sub(m, 9, 8 + #s) < s then -- as many digits: they compare like numbers
      redis.call('LPOP', KEYS[2])
      redis.call('ZREM', KEYS[4], id)
      redis.call('SET', KEYS[1], id, 'PX', ttl)
      redis.call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', math.max(600000, 4 * tonumber(ttl)))
      local n = redis.pcall('PUBLISH', ARGV[1] .. client, 'leased1:granted ' .. s .. ' ' .. s .. ' '
        .. (queue[2] and '1' or '0') .. ' ' .. ARGV[4] .. ' ' .. id .. ' ' .. KEYS[1])
      if n ~= 0 or proof == 'u' then return 1 end
      redis.call('SET', KEYS[1], ARGV[2], 'PX', ttl) -- nobody listens: the next one, the long way
    end
  end
end
