-- The common cases of acquire on a server of a quorum in fewer calls: a writer takes a free
-- lock for which nothing waits, or a new request joins the queue of one that another writer owns.
-- In any other case it makes no one owner or waiter, and vote_before.lua follows.
--
-- KEYS  as in common.lua and vote_before.lua
-- ARGV  as in acquire_fast.lua, but for the ticket (see vote_before.lua) between the digit and the
--       ' ' of the third; and one more at the end, a mark that the client knows to be older than the
--       quarantine, or '-'
-- Returns the token, which is also the server's time, if its mark is the one that the client
-- knows, else {mark, token}; or {mark, last token, time, place, remaining ms of the owner, owner}
-- and, if a PUBLISH was denied, -2. Numbers are strings here, as in acquire_fast.lua.
-- The owner is notified only if the request is first in the queue: it learned of the other
-- requests from the first one, or from its grant.
--
-- It repeats how common.lua writes the clock, the token and the queue, but extends the life
-- of the queue's keys only if they would end within two TTLs.
-- TestTheShortcutsOfAVoteDoWhatTheLongWayDoes compares the two.

-- mode: the byte after 'leased1:'
if string.byte(ARGV[1], 9) == 119 and not ARGV[5] then
  local call, KEYS, id, ttl, known = redis.call, KEYS, ARGV[1], ARGV[2], ARGV[4]
  local present = call('EXISTS', KEYS[1], KEYS[2], KEYS[3], KEYS[5])
  local mark, meta, owner
  if present == 0 then
    mark = call('MGET', KEYS[6])[1] -- no error for another type
  elseif present == 1 then
    local all = call('MGET', KEYS[6], KEYS[5])
    mark, meta = all[2] and all[1], all[2] -- without meta, something else is present
  elseif string.byte(ARGV[3]) == 50 then
    local all = call('MGET', KEYS[6], KEYS[5], KEYS[1])
    mark, meta, owner = all[1], all[2], all[3]
  end
  local t = mark and call('TIME')
  local s = mark and t[1] .. t[2]
  if mark and #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
  -- Equally long digits compare like numbers. What the client knows is the mark of this server.
  if not mark or not (mark == known and #mark == #s and mark <= s) and (tonumber(mark) or 1e300) > tonumber(s) then -- the long way follows
  elseif present < 2 then
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
      return mark == known and s or { mark, s } -- an array costs as much as a call
    end
  elseif meta and owner and owner ~= id then
    local longest, client = string.match(owner, '^leased1:w:([1-9]%d*):[cpu]i?:[%w_-]+:(%S+)$')
    local last = string.match(meta, '^leased1:(%d+):')
    local left, place, now = call('PTTL', KEYS[1]), call('ZCARD', KEYS[2]), string.sub(s, 1, -4)
    if longest and #longest <= 9 and left >= 0 and left - longest <= 0 and last and #last == #s and last < s
      and present == (place > 0 and 3 or 2) -- beside a writer there are no readers, so it is of another type
      and call('ZCOUNT', KEYS[4], '(' .. now, '+inf') == place then -- none of the queue is dead
      local ticket, ms = string.match(ARGV[3], '%d+', 2), tonumber(ttl)
      -- Most often the request has the greatest ticket and so is the last.
      local top, among = place > 0 and call('ZREVRANGE', KEYS[2], '0', '0', 'WITHSCORES')[2], false
      if top and not (type(top) == 'string' and #top > 14 and #top == #ticket and top < ticket) then among = ticket - top <= 0 end
      if not (among and call('ZCOUNT', KEYS[2], ticket, string.format('(%.0f', ticket + 2)) > 0) -- see enqueue
        and call('ZADD', KEYS[4], 'NX', now + ms, id) == 1
        and call('ZADD', KEYS[2], 'NX', ticket, id) == 1 then
        local lasts = call('PTTL', KEYS[4])
        -- Beside other requests, waiters does not last longer than queue: see enqueue.
        if place == 0 or lasts < 2 * ms then
          call('PEXPIRE', KEYS[2], math.max(3 * ms, lasts, call('PTTL', KEYS[2])))
          if lasts < 2 * ms then call('PEXPIRE', KEYS[4], 3 * ms) end
        end
        if among then place = call('ZRANK', KEYS[2], id) end
        if place == 0 then
          local channel = string.sub(ARGV[3], string.find(ARGV[3], ' ', 2, true) + 1) .. client
          if type(redis.pcall('PUBLISH', channel, 'leased1:wanted ' .. owner .. ' ' .. KEYS[1])) == 'table' then
            return { mark, last, s, place, left, owner, -2 }
          end
        end
        return { mark, last, s, place, left, owner }
      end
    end
  end
end
ARGV[#ARGV] = string.match(ARGV[3], '%d+', 2) -- where vote_before.lua looks for the ticket
