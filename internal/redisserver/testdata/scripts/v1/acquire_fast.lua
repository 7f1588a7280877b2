-- The common cases of acquire in fewer calls: a writer takes a free lock for which nothing
-- waits, or joins the queue of a writer's lock. In any other case it writes nothing, and
-- acquire.lua follows.
--
-- KEYS, ARGV  as in acquire.lua
-- Returns the token, which is also the server's time, or waiting_reply (common.lua).
--
-- It runs before common.lua, so it repeats how that file writes the clock, the token, its
-- TTL and the entries of the queue. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

-- mode: the byte after 'leased1:'
if string.sub(ARGV[2], 9, 9) == 'w' then
  local call = redis.call
  local both = call('MGET', KEYS[1], KEYS[5]) -- no error for another type, so EXISTS is asked too
  local value, last = both[1], both[2] and string.match(both[2], '^leased1:(%d+):')
  local first = value and ARGV[3] == '2' and last and call('ZRANGE', KEYS[2], '0', '0')[1]
  if first or not value and call('EXISTS', KEYS[1], KEYS[2], KEYS[3], both[2] and KEYS[1] or KEYS[5]) == 0 then
    local t = call('TIME')
    local micros = tostring(t[2]) -- Dragonfly's are integers
    local s = t[1] .. (#micros == 6 and '' or string.rep('0', 6 - #micros)) .. micros
    if last and (#last ~= #s or last >= s) or both[2] and not last then -- acquire.lua follows
    elseif not first then -- equally long digits compare like numbers
      call('SET', KEYS[1], ARGV[2], 'PX', ARGV[5])
      call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', ARGV[6])
      return tonumber(s)
    else
      -- The owner and the head of the queue have the caller's TTL. The head has asked lately,
      -- so the owner knows that others wait. The keys last: who asks the long way has the
      -- queue and the waiting leases expire together.
      local ttl, now = tonumber(ARGV[5]), math.floor(s / 1000)
      local form = '^leased1:w:' .. ARGV[5] .. ':[cpu]i?:[%w_-]+:%S+$'
      local left = (tonumber(call('ZSCORE', KEYS[4], first) or 0) or 0) - now
      local ends = call('PTTL', KEYS[1])
      if left <= ttl and left > ttl - math.min(ttl / 2, 5000) and ends <= ttl
        and value ~= ARGV[2] and string.find(value, form) and string.find(first, form)
        and call('PTTL', KEYS[2]) >= 2 * ttl then
        local top = call('ZREVRANGE', KEYS[2], '0', '0', 'WITHSCORES')[2]
        if call('ZADD', KEYS[2], 'NX', string.format('%.0f', top + 1), ARGV[2]) == 1 then
          call('ZADD', KEYS[4], now + ttl, ARGV[2])
          return { 2, tonumber(last), tonumber(s), call('ZCARD', KEYS[2]) - 1, ends, value, 0, -1, 0, 0, 0, 0 }
        end
      end
    end
  end
end
