-- The common case of a re-check in fewer calls: a writer waits in the queue behind a live head,
-- and another writer owns the lock. In any other case it writes nothing, and what follows it in
-- the script does the work.
--
-- KEYS, ARGV  as in acquire.lua
-- Returns waiting_reply (common.lua).
--
-- It runs before common.lua, so it repeats how that file writes a waiting lease, the echo and
-- the answer. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

-- mode: the byte after 'leased1:'
if ARGV[3] == '1' and string.sub(ARGV[2], 9, 9) == 'w' and not ARGV[8] then
  local call, match, ttl = redis.call, string.match, tonumber(ARGV[5])
  local both = call('MGET', KEYS[1], KEYS[5]) -- nothing for another type, and then acquire.lua follows
  local owner, last = both[1], tonumber(both[2] and match(both[2], '^leased1:(%d+):') or nil)
  local place = owner and last and owner ~= ARGV[2] and call('ZRANK', KEYS[2], ARGV[2])
  if place and place > 0 then
    local head = call('ZRANGE', KEYS[2], '0', '0')[1]
    local t = call('TIME')
    local us = t[1] * 1000000 + t[2]
    local now = math.floor(us / 1000)
    local longest = match(owner, '^leased1:w:([1-9]%d*):[cpu]i?:[%w_-]+:%S+$')
    local heads = match(head, '^leased1:[wr]:([1-9]%d*):[cpu]i?:[%w_-]+:%S+$')
    local ends, left = call('PTTL', KEYS[1]), (tonumber(call('ZSCORE', KEYS[4], head) or 0) or 0) - now
    -- No lease is longer than its TTL, nor is the last token ahead: the clock was not set back.
    -- The queue's two keys expire together, and late enough.
    if longest and heads and #longest <= 9 and #heads <= 9 and ends - longest <= 0 and left > 0 and left - heads <= 0
      and last <= us and call('PTTL', KEYS[2]) >= 2 * ttl then
      local echoed = -1
      if ARGV[4] ~= '' then
        local client = match(ARGV[2], '^leased1:w:%d+:[cpu]i?:[%w_-]+:(%S+)$')
        echoed = redis.pcall('PUBLISH', ARGV[1] .. client, 'leased1:echo ' .. ARGV[4])
        if type(echoed) == 'table' then echoed = -2 end
      end
      call('ZREM', KEYS[2], '') -- changes nothing, and a full server admits it, so it admits the next
      call('ZADD', KEYS[4], now + ttl, ARGV[2])
      return { 2, last, us, place, ends, owner, 0, echoed, 0, 0, 0, 0 }
    end
  end
end
