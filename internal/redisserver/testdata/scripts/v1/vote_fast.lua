-- The common cases of acquire on a server of a quorum in fewer calls: a writer takes a free
-- lock for which nothing waits, or joins the queue of one that another writer owns. In any
-- other case it makes no one owner or waiter, and vote_before.lua follows.
--
-- KEYS, ARGV  as in acquire.lua and vote_before.lua
-- Returns the token, which is also the server's time, if its mark is older than the quarantine, else {mark,
-- token}; or {mark, last token, time, place, remaining ms of the owner, owner, -2 if a PUBLISH was
-- denied, else -1}.
-- It notifies the owner only if the request is first in the queue: it knows of the others
-- from the first one, or from its grant.
--
-- It repeats how common.lua writes the clock, the token and the queue, but extends the life
-- of the queue's keys only if they would end within two TTLs.
-- TestTheShortcutsOfAVoteDoWhatTheLongWayDoes compares the two.

local call, match = redis.call, string.match
local id = ARGV[2]
-- mode: the byte after 'leased1:'. The ninth argument is the ticket unless there is a tenth.
if string.sub(id, 9, 9) == 'w' and not ARGV[10] then
  local all = call('MGET', KEYS[6], KEYS[1], KEYS[5]) -- no error for another type, so EXISTS is asked too
  local mark, owner, m, t = all[1], all[2], all[3], call('TIME')
  local micros = tostring(t[2]) -- Dragonfly's are integers
  local s = t[1] .. (#micros == 6 and '' or string.rep('0', 6 - #micros)) .. micros
  local us, last = tonumber(s), m and match(m, '^leased1:(%d+):')
  if not mark or (tonumber(mark) or us + 1) > us or m and not (last and #last == #s and last < s) then -- the long way follows
  elseif not owner then
    if call('EXISTS', KEYS[1], KEYS[2], KEYS[3], m and KEYS[1] or KEYS[5]) == 0 then
      call('SET', KEYS[1], id, 'PX', ARGV[5])
      call('SET', KEYS[5], 'leased1:' .. s .. ':' .. s, 'PX', ARGV[6])
      return us - mark > ARGV[8] * 1000 and us or { mark, us } -- an array costs as much as a call
    end
  elseif m and owner ~= id and ARGV[3] ~= '0' and ARGV[4] == '' then
    local longest, client = match(owner, '^leased1:w:([1-9]%d*):[cpu]i?:[%w_-]+:(%S+)$')
    local left, place, now = call('PTTL', KEYS[1]), call('ZCARD', KEYS[2]), string.sub(s, 1, 13)
    if longest and #longest <= 9 and left >= 0 and left - longest <= 0
      and call('EXISTS', KEYS[3]) == 0 -- beside a writer there are no readers, so it is of another type
      and call('ZCOUNT', KEYS[4], '(' .. now, '+inf') == place then -- none of the queue is dead
      local ttl, ticket = ARGV[5], ARGV[9]
      -- Most often it has the greatest ticket, and is the last.
      local among = place > 0 and ticket - call('ZREVRANGE', KEYS[2], '0', '0', 'WITHSCORES')[2] <= 0
      if not (among and call('ZCOUNT', KEYS[2], ticket, string.format('(%.0f', ticket + 2)) > 0) -- see enqueue
        and call('ZADD', KEYS[4], 'NX', string.format('%.0f', now + ttl), id) == 1
        and call('ZADD', KEYS[2], 'NX', ticket, id) == 1 then
        if call('PTTL', KEYS[2]) < 2 * ttl then call('PEXPIRE', KEYS[2], 3 * ttl) end
        if call('PTTL', KEYS[4]) < 2 * ttl then call('PEXPIRE', KEYS[4], 3 * ttl) end
        local echoed = -1
        if among then place = call('ZRANK', KEYS[2], id) end
        if place == 0 and type(redis.pcall('PUBLISH', ARGV[1] .. client, 'leased1:wanted ' .. owner .. ' ' .. KEYS[1])) == 'table' then
          echoed = -2
        end
        return { mark, tonumber(last), us, place, left, owner, echoed }
      end
    end
  end
end
