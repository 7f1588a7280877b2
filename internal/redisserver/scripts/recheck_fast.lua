-- The common case of a re-check in fewer calls: a writer waits in the queue behind a live head, or
-- behind a hundred others, and another writer owns the lock. In any other case it writes nothing,
-- and what follows it in the script does the work.
--
-- KEYS, ARGV  as in acquire_fast.lua
-- Returns what acquire_fast.lua returns for a request that waits, and if an echo is asked for how
-- many received it, -2 if it was denied.
--
-- It runs before common.lua, so it repeats how that file writes a waiting lease, the echo and
-- the answer. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

-- mode: the byte after 'leased1:'
if string.byte(ARGV[3]) == 49 and string.byte(ARGV[1], 9) == 119 and not ARGV[6] then
  local call, match, KEYS, id, ttl = redis.call, string.match, KEYS, ARGV[1], tonumber(ARGV[2])
  local both = call('MGET', KEYS[1], KEYS[5]) -- nothing for another type, and then acquire.lua follows
  local owner, last = both[1], both[2] and match(both[2], '^leased1:(%d+):')
  local place = owner and last and owner ~= id and call('ZRANK', KEYS[2], id)
  if place and place > 0 then
    local t = call('TIME')
    local s = t[1] .. t[2]
    if #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
    local now = math.floor(s / 1000)
    local longest = match(owner, '^leased1:w:([1-9]%d*):[cpu]i?:[%w_-]+:%S+$')
    local ends, lives = call('PTTL', KEYS[1]), true
    -- Waiters further behind leave a dead head to the first hundred and to the release. They check
    -- it only when they ask for an echo, because all in front of them may be dead.
    if place < 100 or ARGV[4] and ARGV[4] ~= '' then
      local head = call('ZRANGE', KEYS[2], '0', '0')[1]
      local heads = match(head, '^leased1:[wr]:([1-9]%d*):[cpu]i?:[%w_-]+:%S+$')
      local left = (tonumber(call('ZSCORE', KEYS[4], head) or 0) or 0) - now
      lives = heads and #heads <= 9 and left > 0 and left - heads <= 0
    end
    -- If no lease is longer than its TTL and the last token is not ahead, the clock was not set
    -- back. The queue's two keys expire together, so it is enough that one lasts.
    if lives and longest and #longest <= 9 and ends - longest <= 0
      and #last == #s and last <= s and call('PTTL', KEYS[2]) >= 2 * ttl then
      local answer = { last, s, place, ends, owner }
      if ARGV[4] and ARGV[4] ~= '' then
        local client = match(id, '^leased1:w:%d+:[cpu]i?:[%w_-]+:(%S+)$')
        local channel = string.sub(ARGV[3], string.find(ARGV[3], ' ', 2, true) + 1) .. client
        local echoed = redis.pcall('PUBLISH', channel, 'leased1:echo ' .. ARGV[4])
        answer[6] = type(echoed) == 'table' and -2 or echoed
      end
      call('ZREM', KEYS[2], '') -- changes nothing, and a full server admits it, so it admits the next
      call('ZADD', KEYS[4], now + ttl, id)
      return answer
    end
  end
end
