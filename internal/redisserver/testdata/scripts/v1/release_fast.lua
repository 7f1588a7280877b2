-- The common cases of release in fewer calls, and with fewer conversions of numbers, which
-- cost as much: a writer gives the lock back, and nothing waits or a live writer is next.
-- In any other case, a cool-down too, it writes nothing, and release.lua follows, or cancel.lua.
--
-- KEYS  as in release.lua
-- ARGV  1 id, 2 span, ' ' and the prefix of inbox channels; as far as they are needed: 3 last
--       token the owner assigned, '0' if only the grant's own, 4 for how many ms a writer's lock
--       is kept from all others
-- Returns how many were made owner.
--
-- It runs before common.lua, so it repeats how that file writes the clock, the token and
-- its TTL (which depends on the next owner's, so the client cannot pass it), and the
-- granted message of grant_next. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

-- mode: the byte after 'leased1:'
if string.byte(ARGV[1], 9) == 119 and not ARGV[4] then
  local call, KEYS, id, used = redis.call, KEYS, ARGV[1], ARGV[3] or '0'
  local queue = call('ZRANGE', KEYS[2], '0', '1')
  local head, value, meta = queue[1], nil, nil
  if head or used ~= '0' then
    local both = call('MGET', KEYS[1], KEYS[5]) -- no error for another type
    value, meta = both[1], both[2]
  else
    value = call('GET', KEYS[1])
  end
  if value ~= id then -- release.lua follows
  elseif not head then
    if used == '0' then
      call('DEL', KEYS[1])
      return 0
    end
    local last = string.match(meta or '', '^leased1:(%d+):')
    if last and #last == 16 and #used == 16 then -- equally long digits compare like numbers
      if last >= used then
        if last < '9007199254740000' then -- nothing to remember
          call('DEL', KEYS[1])
          return 0
        end
      else
        local t = call('TIME')
        local s = t[1] .. t[2]
        if #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
        if #used == #s and used < s then -- a token ahead of the clock is kept for longer
          local colon = string.find(id, ':', 11, true) -- behind the TTL
          call('DEL', KEYS[1])
          call('SET', KEYS[5], 'leased1:' .. used .. ':' .. s .. ':' .. id,
            'PX', colon < 17 and '600000' or math.max(600000, 4 * string.sub(id, 11, colon - 1)))
          return 0
        end
      end
    end
  else
    local ttl, proof, client = string.match(head, '^leased1:w:([1-9]%d*):([cpu])i?:[%w_-]+:(%S+)$')
    local last = string.match(meta or '', '^leased1:(%d+):')
    if last and ttl and #ttl <= 9 then
      local t = call('TIME')
      local s = t[1] .. t[2]
      if #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
      local left = (tonumber(call('ZSCORE', KEYS[4], head) or 0) or 0) - s / 1000
      if left > 0 and left - ttl <= 0
        and #last == #s and last < s -- equally long digits compare like numbers
        and (used == '0' or #used == #s and used < s) then
        local space = string.find(ARGV[2], ' ', 1, true)
        local channel = string.sub(ARGV[2], space + 1) .. client
        if proof ~= 'c' or redis.pcall('PUBSUB', 'NUMSUB', channel)[2] ~= 0 then
          call('ZREM', KEYS[2], head)
          call('ZREM', KEYS[4], head)
          call('SET', KEYS[1], head, 'PX', proof == 'p' and ttl - 2000 > 0 and '2000' or ttl) -- PROVISIONAL of common.lua
          call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
          redis.pcall('PUBLISH', channel, 'leased1:granted ' .. s .. ' ' .. s .. (queue[2] and ' 1 ' or ' 0 ')
            .. string.sub(ARGV[2], 1, space) .. head .. ' ' .. KEYS[1])
          return 1
        end
      end
    end
  end
end
