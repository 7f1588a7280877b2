-- The common cases of acquire in fewer calls: a writer takes a free lock for which nothing
-- waits, or joins the queue of a writer's lock, also as the first. In any other case it writes
-- nothing, and acquire.lua follows.
--
-- KEYS  as in common.lua
-- ARGV  1 id, 2 its TTL in ms, 3 '0' not to wait, '1' to wait, '2' to wait with an id that was
--       never sent before, '3' as in recheck_fast.lua, '4' for the question of an owner, followed
--       by ' ' and the prefix of inbox channels; as far as they are needed, and 4 with a
--       question: 4 nonce for an echo to the caller's inbox or '', 5 id of the caller's own
--       readers, which are not notified that it waits, or '', 6 the time up to which the previous
--       call notified readers
-- Returns the token, which is also the server's time, or {last token, time, place, remaining ms
-- of the owner's lease, owner}, and -2 if a PUBLISH was denied. Numbers are strings here, because a
-- conversion costs as much as a call.
--
-- It runs before common.lua, so it repeats how that file writes the clock, the token, its
-- TTL and the entries of the queue. TestTheShortcutsDoWhatTheLongWayDoes compares the two.
-- Each argument costs, and so does each global that is named.

-- mode: the byte after 'leased1:'
if string.byte(ARGV[1], 9) == 119 and not ARGV[4] then
  local call, KEYS, id, ttl = redis.call, KEYS, ARGV[1], ARGV[2]
  local present = call('EXISTS', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
  local meta = present == 1 and call('GET', KEYS[5])
  if meta or present == 0 then
    local t = call('TIME')
    local s = t[1] .. t[2]
    if #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
    -- Of this format, meta has the last token from its ninth byte on. Equally long digits compare
    -- like numbers.
    local fits = not meta
    if meta then
      local one, colon = string.byte(meta, 7, 8)
      fits = one == 49 and colon == 58 and string.byte(meta, 9 + #s) == 58 and string.sub(meta, 9, 8 + #s) < s
    end
    if fits then
      call('SET', KEYS[1], id, 'PX', ttl)
      call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
      return s
    end
  elseif string.byte(ARGV[3]) == 50 then
    local both = call('MGET', KEYS[1], KEYS[5]) -- no error for another type, and then acquire.lua follows
    local value, last = both[1], both[2] and string.match(both[2], '^leased1:(%d+):')
    if value and last and value ~= id then
      local t = call('TIME')
      local s = t[1] .. t[2]
      if #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
      local ms, now, ends = tonumber(ttl), math.floor(s / 1000), call('PTTL', KEYS[1])
      local first = present == 4 and call('ZRANGE', KEYS[2], '0', '0')[1]
      if #last ~= #s or last >= s then -- acquire.lua follows
      elseif first then
        -- Only if the owner and the head of the queue have the caller's TTL, the head has asked
        -- lately, so that the owner knows that others wait, and the queue's keys last long enough.
        -- Of the two, waiters never lasts longer: see enqueue.
        local form = '^leased1:w:' .. ttl .. ':[cpu]i?:[%w_-]+:%S+$'
        local left = (tonumber(call('ZSCORE', KEYS[4], first) or 0) or 0) - now
        if left <= ms and left > ms - math.min(ms / 2, 5000) and ends >= 0 and ends <= ms
          and string.find(value, form) and string.find(first, form)
          and call('PTTL', KEYS[4]) >= 2 * ms then
          local top = call('ZREVRANGE', KEYS[2], '0', '0', 'WITHSCORES')[2]
          if call('ZADD', KEYS[2], 'NX', top + 1, id) == 1 then
            call('ZADD', KEYS[4], now + ms, id)
            return { last, s, call('ZCARD', KEYS[2]) - 1, ends, value }
          end
        end
      elseif present == 2 then
        -- Nobody else waits, so the owner has to be notified.
        local longest, client = string.match(value, '^leased1:w:([1-9]%d*):[cpu]i?:[%w_-]+:(%S+)$')
        if longest and #longest <= 9 and ends >= 0 and ends - longest <= 0 then
          call('ZADD', KEYS[2], '1', id)
          call('ZADD', KEYS[4], now + ms, id)
          call('PEXPIRE', KEYS[2], 3 * ms)
          call('PEXPIRE', KEYS[4], 3 * ms)
          local channel = string.sub(ARGV[3], 3) .. client
          if type(redis.pcall('PUBLISH', channel, 'leased1:wanted ' .. value .. ' ' .. KEYS[1])) == 'table' then
            return { last, s, 0, ends, value, -2 }
          end
          return { last, s, 0, ends, value }
        end
      end
    end
  end
end
