-- Re-checks in fewer calls. In any case other than these two it leaves everything as it was, and what
-- follows it in the script does the work.
--   1. The caller needs to know only whether its request has waited all the time since its last
--      answer, and it has.
--   2. A writer waits at the head of the queue, behind a head that has asked lately, or behind a hundred
--      others, and another writer owns the lock.
--
-- KEYS, ARGV  as in acquire_fast.lua; for case 1, ARGV[3] begins with '3', the time, in ms, at which
--             the waiting lease is to end, '+', and how much later that is than when it ends so far
-- Returns in case 1 how many received the echo, -1 if none was requested, -2 if it was denied. In case
-- 2 it returns what acquire_fast.lua does for a request that waits, followed by how many received the
-- echo, if one was requested, or by -2 if a message was denied.
--
-- It runs before common.lua, so it repeats how that file writes a waiting lease, the messages and
-- the answer. TestTheShortcutsDoWhatTheLongWayDoes compares the two.

local how = string.byte(ARGV[3])
if how == 51 then
  local till, later, inboxes = string.match(ARGV[3], '^3(%d+)%+(%d+) (.*)$')
  -- A full server refuses this, but admits the first write of acquire.lua, and then the others.
  local ends = redis.pcall('ZADD', KEYS[4], 'XX', 'INCR', later, ARGV[1])
  if ends == till then
    if not ARGV[4] or ARGV[4] == '' then return -1 end
    local channel = inboxes .. string.match(ARGV[1], '^leased1:[wr]:%d+:[cpu]i?:[%w_-]+:(%S+)$')
    local echoed = redis.pcall('PUBLISH', channel, 'leased1:echo ' .. ARGV[4])
    return type(echoed) == 'table' and -2 or echoed
  elseif type(ends) == 'string' then -- another copy of an acquire came in between
    redis.call('ZADD', KEYS[4], 'XX', 'INCR', '-' .. later, ARGV[1])
  end
end
-- mode: the byte after 'leased1:'
if (how == 49 or how == 51) and string.byte(ARGV[1], 9) == 119 and not ARGV[6] then
  local call, match, KEYS, id, ttl = redis.call, string.match, KEYS, ARGV[1], tonumber(ARGV[2])
  local asks = ARGV[4] and ARGV[4] ~= ''
  local both = call('MGET', KEYS[1], KEYS[5]) -- nothing for another type, and then acquire.lua follows
  local owner, last = both[1], both[2] and match(both[2], '^leased1:(%d+):')
  local place = owner and last and owner ~= id and call('ZRANK', KEYS[2], id)
  if place then
    local t = call('TIME')
    local s = t[1] .. t[2]
    if #s ~= 16 then s = t[1] .. string.rep('0', 6 - #(t[2] .. '')) .. t[2] end
    local now = math.floor(s / 1000)
    local longest, client = match(owner, '^leased1:w:([1-9]%d*):[cpu]i?:[%w_-]+:(%S+)$')
    local ends, lives = call('PTTL', KEYS[1]), true
    -- Waiters further behind leave a dead head to the first hundred and to the release. They check
    -- it only when they ask for an echo, because all in front of them may be dead.
    if place < 100 or asks then
      local head = place == 0 and id or call('ZRANGE', KEYS[2], '0', '0')[1]
      local heads = match(head, '^leased1:[wr]:([1-9]%d*):[cpu]i?:[%w_-]+:%S+$')
      local left = (tonumber(call('ZSCORE', KEYS[4], head) or 0) or 0) - now
      lives = heads and #heads <= 9 and left > 0 and left - heads <= 0
        and (place == 0 or left > heads - math.min(heads / 2, 5000)) -- see asked_lately
    end
    -- If no lease is longer than its TTL and the last token is not ahead, the clock was not set
    -- back. Of the queue's two keys, waiters never lasts longer: see enqueue. A full server
    -- refuses this ZADD, but admits the first write of acquire.lua, and then the others.
    if lives and longest and #longest <= 9 and ends >= 0 and ends - longest <= 0
      and #last == #s and last <= s and call('PTTL', KEYS[4]) >= 2 * ttl
      and type(redis.pcall('ZADD', KEYS[4], now + ttl, id)) == 'number' then
      local answer = { last, s, place, ends, owner }
      local inboxes = (asks or place == 0) and string.sub(ARGV[3], string.find(ARGV[3], ' ', 2, true) + 1)
      if asks then
        local channel = inboxes .. match(id, '^leased1:w:%d+:[cpu]i?:[%w_-]+:(%S+)$')
        local echoed = redis.pcall('PUBLISH', channel, 'leased1:echo ' .. ARGV[4])
        answer[6] = type(echoed) == 'table' and -2 or echoed
      end
      if place == 0 then -- the head repeats that the owner is wanted
        local channel = inboxes .. client
        if type(redis.pcall('PUBLISH', channel, 'leased1:wanted ' .. owner .. ' ' .. KEYS[1])) == 'table' then answer[6] = -2 end
      end
      return answer
    end
  end
end
