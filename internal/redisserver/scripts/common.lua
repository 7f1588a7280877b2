-- Precedes every script except the renewals, and follows the script's shortcut if it has one.
--
-- KEYS  1 lock, 2 queue, 3 readers, 4 waiters, 5 meta (all in one slot)
-- ARGV  1 the prefix of inbox channels, before a client's name; the rest is the script's own
--
-- Invariants:
--   An owner is recorded before it is notified, and a grant that was announced is never
--   undone: PUBLISH also reaches subscribers of replicas, which its count leaves out.
--   Except for evict and clamp, a script ends or extends only the ownership of the ids that it
--   is called with.
--   If a script gives a lock back or keeps what a client has, its first write is one that a
--   server without free memory admits (DEL, ZREM, ZREMRANGEBYSCORE, PEXPIRE). After such a
--   write, that server admits the others, too.
--   Values that a later format wrote are neither parsed nor overwritten.
--   Every script can run twice.
--
-- The queue is a sorted set scored by a growing number, so finding, adding and removing an
-- entry stays cheap however long it is. The expiry of each entry is its score in waiters.

local lock = KEYS[1] -- in messages; calls name KEYS[n], which proxies of managed clusters look for
local MARK = 'leased1:readers'

local value = redis.call('GET', KEYS[1])
local t = redis.call('TIME') -- once: on Redis 7.0 the clock moves while a script runs
local us = t[1] * 1000000 + t[2]
local now = math.floor(us / 1000)
local last, newer_meta -- set by last_token; newer_meta: what is in meta, if a later format wrote it
local span = '-' -- span of the lease that is given back, sent along with granted
-- A call drops at most 500 dead entries or grants to 100 requests, so that it stays short.
-- unfinished is 1 if the budget ran out before the work was done: the client must continue at once.
local budget, unfinished = 500, 0
local handed = 0 -- how many requests other than the caller's were made owner
local denied = false -- whether a PUBLISH was refused
local PROVISIONAL = 2000 -- for how many ms a "p" id is made owner by a message, see parse_id
local old_gone = 0 -- 1 if a yield found that its old id no longer owned

-- int formats a number. Above 1e14, tostring would lose digits.
local function int(n) return string.format('%.0f', n) end

-- parse_id returns the mode, TTL, proof and client of id, or nil if id is not of this format. The
-- proof says what shows that the client is gone: 'c', that nobody listens to its inbox; 'p', that
-- it was notified of a grant and neither renews it nor asks for it again before it expires; 'u',
-- nothing does.
local function parse_id(id)
  local mode, ttl, proof, client = string.match(id, '^leased1:([wr]):(%d+):([cpu])i?:[%w_-]+:(%S+)$')
  if not mode or #ttl > 12 or tonumber(ttl) < 1 then return nil end
  return mode, tonumber(ttl), proof, client
end

-- is_newer reports whether v was written by a later format.
local function is_newer(v)
  local format = v and string.match(v, '^leased(%d+):')
  return format and tonumber(format) > 1
end

-- cooldown_of returns for how many ms a writer that released the lock has it kept from everybody
-- if v is the value of such a lock, leased1:cooldown:<ms>:<its id>, and otherwise nil.
local function cooldown_of(v)
  local ms = v and string.match(v, '^leased1:cooldown:(%d+):')
  return ms and #ms <= 12 and tonumber(ms) or nil
end

-- last_token returns the highest token that was assigned, 0 if it is not remembered.
local function last_token()
  if not last then
    local m = redis.call('GET', KEYS[5])
    newer_meta = is_newer(m) and m
    local digits = m and string.match(m, '^leased1:(%d+):')
    last = digits and #digits <= 16 and tonumber(digits) or 0
    if last > 9007199254740000 then last = 0 end
  end
  return last
end

-- remember stores the last token and the server's time, followed by the id of the owner that
-- assigned the token if this server did not. They are kept for four TTLs, and for ten minutes at
-- least. If the token is ahead of the clock, because the clock was set back, that time starts when
-- the clock has reached the token.
local function remember(ttl, drawn_by)
  if newer_meta then return end
  local ahead = math.min(math.max(0, (last - us) / 1000), 1e12)
  redis.call('SET', KEYS[5], 'leased1:' .. int(last) .. ':' .. int(us) .. (drawn_by and ':' .. drawn_by or ''),
    'PX', int(ahead + math.max(600000, 4 * ttl)))
end

-- adopt_token stores the last token that the owner id assigned locally, unless a later one is known.
local function adopt_token(token, ttl, id)
  token = tonumber(token) or 0
  if token > 0 and token > last_token() and token < 9007199254740000 then
    last = token
    remember(ttl, id)
  end
end

-- check_types raises an error if a key is of another type, before anything is written.
local function check_types()
  redis.call('ZCARD', KEYS[2])
  redis.call('ZCARD', KEYS[4])
  redis.call('ZCARD', KEYS[3])
  last_token()
end

-- live_readers removes expired readers and returns how many are left.
local function live_readers()
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', int(now))
  return redis.call('ZCARD', KEYS[3])
end

-- sync_marker makes the readers' marker expire with the last live reader, and deletes it
-- if there is none. renew_shared.lua has a shorter copy for a reader that is known to be an owner.
local function sync_marker()
  live_readers()
  local top = redis.call('ZREVRANGE', KEYS[3], '0', '0', 'WITHSCORES')
  if not top[1] then
    if value == MARK then
      redis.call('DEL', KEYS[1])
      value = false
    end
    return
  end
  local ends = int(math.min(tonumber(top[2]), now + 1e12)) -- a foreign score can be anything, even inf
  -- Up to Redis 7.0, PEXPIREAT sees the clock move while a script runs. So an earlier one may have
  -- ended the marker at once, whose readers were alive when the script began.
  if value ~= MARK or redis.call('PEXPIREAT', KEYS[1], ends) == 0 then
    redis.call('SET', KEYS[1], MARK, 'PX', int(math.max(1, tonumber(ends) - now)))
    redis.call('PEXPIREAT', KEYS[1], ends)
    value = MARK
  end
  redis.call('PEXPIREAT', KEYS[3], ends)
end

local function owns(id, mode)
  if mode == 'w' then return value == id end
  if value ~= MARK then return false end
  local ends = redis.call('ZSCORE', KEYS[3], id)
  return ends and tonumber(ends) > now
end

-- record_owner records id as an owner and returns its new token. Its caller must call remember
-- afterwards, and for readers sync_marker before that: once, however many readers there are.
local function record_owner(id, mode, ttl)
  last = math.max(last_token() + 1, us)
  if mode == 'w' then
    redis.call('SET', KEYS[1], id, 'PX', int(ttl))
    value = id
  else
    redis.call('ZADD', KEYS[3], int(now + ttl), id)
  end
  return last
end

-- make_owner makes a single id the owner and returns its token.
local function make_owner(id, mode, ttl)
  local token = record_owner(id, mode, ttl)
  if mode == 'r' then sync_marker() end
  remember(ttl)
  return token
end

-- clear_owner ends the ownership of id. owns(id, mode) must be true. The last reader and the marker go by
-- one command: if an ACL forbids any that is called here, the marker does not stay without a reader.
local function clear_owner(id, mode)
  if mode == 'w' then
    redis.call('DEL', KEYS[1])
    value = false
  elseif live_readers() > 1 then
    redis.call('ZREM', KEYS[3], id)
    sync_marker()
  else
    redis.call('DEL', KEYS[1], KEYS[3])
    value = false
  end
end

-- give_back ends the ownership of id. owns(id, mode) must be true; token is the last one that id
-- assigned locally. With a cool-down, in ms, a writer's lock has no owner, but is not free
-- either, until the cool-down is over.
local function give_back(id, mode, ttl, token, cooldown)
  if mode == 'r' or not cooldown then
    clear_owner(id, mode)
    adopt_token(token, ttl, id)
    return
  end
  redis.call('PEXPIRE', KEYS[1], cooldown) -- a first write that a full server admits
  value = 'leased1:cooldown:' .. cooldown .. ':' .. id
  redis.call('SET', KEYS[1], value, 'PX', cooldown)
  adopt_token(token, ttl, id)
  if last_token() ~= 0 and redis.call('PTTL', KEYS[5]) < cooldown + 600000 then
    redis.call('PEXPIRE', KEYS[5], int(cooldown + 600000))
  end
end

-- extend gives the owner id its full TTL again, because a client counts the lease of a repeated
-- request from when it sent that. It returns the last token, and 1, or 2 if the token was not
-- remembered and a new one was drawn.
local function extend(id, mode, ttl)
  if mode == 'w' then
    redis.call('PEXPIRE', KEYS[1], int(ttl))
  else
    redis.call('PEXPIRE', KEYS[3], int(math.max(redis.call('PTTL', KEYS[3]), ttl)))
    redis.call('ZADD', KEYS[3], int(now + ttl), id)
    sync_marker()
  end
  if last_token() ~= 0 then return last, 1 end
  last = us
  remember(ttl)
  return last, 2
end

-- free reports whether a request of this mode can own the lock now. It does not look at
-- the queue.
local function free(mode)
  if value and value ~= MARK then return false end
  last_token()
  if newer_meta then return false end
  return mode == 'r' or live_readers() == 0
end

-- drop removes ids from the queue.
local function drop(ids)
  if #ids == 0 then return end
  redis.call('ZREM', KEYS[2], unpack(ids))
  redis.call('ZREM', KEYS[4], unpack(ids))
  budget = budget - #ids
end

-- clamp_waiting shortens those of these waiting leases, alternately an id and an expiry, that are longer
-- than the TTL in the id: there the server's clock was set back. It returns how many it has shortened.
local function clamp_waiting(leases)
  local cut = 0
  for i = 1, #leases, 2 do
    local _, ttl = parse_id(leases[i])
    if ttl and tonumber(leases[i + 1]) - now > ttl then
      if cut == 0 then redis.call('PEXPIRE', KEYS[4], int(math.max(redis.call('PTTL', KEYS[4]), ttl))) end
      redis.call('ZADD', KEYS[4], int(now + ttl), leases[i])
      cut = cut + 1
    end
  end
  budget = budget - cut
  return cut
end

-- clamp_all_waiting shortens all waiting leases that are too long, as far as the budget goes, so that those
-- of the dead do not end one after the other, each a TTL after it has become the first.
local function clamp_all_waiting()
  if budget > 0 then clamp_waiting(redis.call('ZREVRANGE', KEYS[4], 0, budget - 1, 'WITHSCORES')) end
end

-- head drops dead entries at the head of the queue and returns the first live one: its id,
-- mode (nil if a later format wrote it), TTL, proof and client. It returns false if the queue
-- is empty, and nil if the budget ran out before a live entry was found.
local function head()
  local batch = redis.call('ZRANGE', KEYS[2], '0', '0') -- most often the first one is alive
  while batch[1] do
    local dead = {}
    for _, id in ipairs(batch) do
      local ends = tonumber(redis.call('ZSCORE', KEYS[4], id) or 0) or 0
      if ends > now then
        local mode, ttl, proof, client = parse_id(id)
        if mode or is_newer(id) then
          drop(dead)
          if clamp_waiting({ id, ends }) > 0 then clamp_all_waiting() end
          return id, mode, ttl, proof, client
        end
      end
      dead[#dead + 1] = id
    end
    drop(dead)
    if budget <= 0 then
      unfinished = redis.call('EXISTS', KEYS[2])
      if unfinished == 1 then return nil end
    end
    batch = redis.call('ZRANGE', KEYS[2], 0, math.min(math.max(budget, 1), 100) - 1)
  end
  return false
end

-- publish sends text to a client's inbox and returns how many received it, nil if the
-- server refused.
local function publish(client, text)
  local n = redis.pcall('PUBLISH', ARGV[1] .. client, 'leased1:' .. text)
  if type(n) == 'table' then
    denied = true
    return nil
  end
  return n
end

-- inbox_gone reports whether it is certain that a client no longer listens. It is called before
-- anything is published to the client, because PUBLISH does not tell: its count leaves out
-- subscribers of replicas, which receive the message all the same. An error, for example
-- because an ACL forbids the question, proves nothing.
local function inbox_gone(client)
  local n = redis.pcall('PUBSUB', 'NUMSUB', ARGV[1] .. client)
  return n[2] == 0
end

-- grant_next makes the head of the queue an owner, again and again as long as the lock is free for
-- it: one writer, or all readers in a row. It returns the token of caller if that id was among
-- them, else nil. The others are notified. Those with a "p" id own the lock for PROVISIONAL at
-- most, until they say that they are there.
local function grant_next(caller)
  local granted, longest, shared = {}, 0, false
  repeat
    local id, mode, ttl, proof, client = head()
    if not id or not mode or not free(mode) then break end
    if budget <= 0 then
      unfinished = 1
      break
    end
    redis.call('ZREM', KEYS[2], id)
    redis.call('ZREM', KEYS[4], id)
    budget = budget - 5
    local present = id == caller or proof ~= 'c' or not inbox_gone(client)
    if present then
      local lease = id ~= caller and proof == 'p' and math.min(ttl, PROVISIONAL) or ttl
      granted[#granted + 1] = { id, client, record_owner(id, mode, lease) }
      longest, shared = math.max(longest, ttl), mode == 'r'
    end
  until present and mode == 'w'
  if #granted == 0 then return nil end
  if shared then sync_marker() end
  remember(longest)
  local token, more = nil, redis.call('EXISTS', KEYS[2])
  for _, g in ipairs(granted) do
    if g[1] == caller then
      token = g[3]
    else
      handed = handed + 1
      publish(g[2], 'granted ' .. int(g[3]) .. ' ' .. int(us) .. ' ' .. more .. ' ' .. span .. ' ' .. g[1] .. ' ' .. lock)
    end
  end
  return token
end

-- notify_owners sends a message to every owner but the id except. Of many readers it notifies
-- about 100, those whose leases end first after the time after. It returns the end of the last of
-- these leases, where the next call continues, or 0 if there are no more readers.
-- It continues by time and not by rank, because readers that were notified leave, which shifts
-- the ranks of the others.
local function notify_owners(what, except, after)
  if value == MARK then
    local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. int(math.max(after or 0, now)), '+inf', 'LIMIT', 0, 100)
    local upto = 0
    if #ids == 100 then
      local ends = redis.call('ZSCORE', KEYS[3], ids[100])
      for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], ends, ends)) do ids[#ids + 1] = id end
      if (tonumber(ends) or math.huge) < 9007199254740000 and redis.call('ZCOUNT', KEYS[3], '(' .. ends, '+inf') > 0 then
        upto = math.ceil(tonumber(ends))
      end
    end
    local notified = {}
    for _, id in ipairs(ids) do
      local mode, _, _, client = parse_id(id)
      if mode and id ~= except and not notified[id] then publish(client, what .. ' ' .. id .. ' ' .. lock) end
      notified[id] = true
    end
    return upto
  end
  if value then
    local mode, _, _, client = parse_id(value)
    if mode then publish(client, what .. ' ' .. value .. ' ' .. lock) end
  end
  return 0
end

-- notify_of_expiry tells the head of the queue, unless that is the id except, when the last reader's
-- lease or a cool-down ends: the head may have planned its re-check for the end of a lease that was
-- given back. A cool-down is also announced to as many others behind the head, to each a little later
-- than to the one ahead: if the head dies before the end, nobody else may know that the lock is free.
local function notify_of_expiry(except, others)
  if value ~= MARK and not cooldown_of(value) or not head() then return end
  local left = redis.call('PTTL', KEYS[1])
  for i, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, value == MARK and 0 or others)) do
    local mode, _, _, client = parse_id(id)
    if mode and id ~= except then publish(client, 'ends ' .. int(left + 5 * (i - 1)) .. ' ' .. id .. ' ' .. lock) end
  end
end

-- clamp shortens leases that are longer than the TTL in their owner's id, and a cool-down that is
-- longer than its value says: there the server's clock was set back. The expiry of a foreign
-- owner is left alone. Waiting leases are looked at if the one that ends last is too long; one that is
-- longer by its own TTL hides the others until head meets one of them.
local function clamp()
  if clamp_waiting(redis.call('ZREVRANGE', KEYS[4], '0', '0', 'WITHSCORES')) > 0 then clamp_all_waiting() end
  if value == MARK or not value then
    local cut = false
    local all = redis.call('ZREVRANGE', KEYS[3], 0, 99, 'WITHSCORES')
    for i = 1, #all, 2 do
      local _, ttl = parse_id(all[i])
      if ttl and tonumber(all[i + 1]) - now > ttl then
        redis.call('ZREM', KEYS[3], all[i]) -- a first write that a full server admits
        redis.call('ZADD', KEYS[3], int(now + ttl), all[i])
        cut = true
      elseif not ttl and not is_newer(all[i]) then
        redis.call('ZREM', KEYS[3], all[i])
        cut = true
      end
    end
    if cut then sync_marker() end
  else
    local _, ttl = parse_id(value)
    ttl = ttl or cooldown_of(value)
    local left = redis.call('PTTL', KEYS[1]) -- -1 if somebody has removed the expiry
    if ttl and (left > ttl or left == -1) then redis.call('PEXPIRE', KEYS[1], int(ttl)) end
  end
end

-- enqueue adds id to the tail of the queue unless it waits already, and makes its waiting lease
-- last one TTL from now. The queue's two keys then last for two TTLs at least, and waiters no longer
-- than queue, so that the shortcuts have to look at waiters only. When it has them last longer, it also
-- drops dead entries behind a live head, up to 100: they would stay there as long as the owner does. It
-- returns the place and whether id is new.
local function enqueue(id, ttl)
  local place = redis.call('ZRANK', KEYS[2], id)
  local new = not place
  if new and KEYS.ticket then -- on a server of a quorum, see vote_before.lua
    local ticket = tonumber(KEYS.ticket)
    -- Of requests with tickets of the same instant, the one that comes first is first.
    local same = redis.call('ZRANGEBYSCORE', KEYS[2], KEYS.ticket, string.format('(%.0f', ticket + 2), 'WITHSCORES')
    redis.call('ZADD', KEYS[2], string.format('%.2f', same[1] and same[#same] + 0.25 or ticket), id)
    place = redis.call('ZRANK', KEYS[2], id)
  elseif new then
    local top = redis.call('ZREVRANGE', KEYS[2], '0', '0', 'WITHSCORES')[2]
    redis.call('ZADD', KEYS[2], int((tonumber(top or 0) or 0) + 1), id)
    place = redis.call('ZCARD', KEYS[2]) - 1
  end
  -- For an id that waits already, the first write must be one that a full server admits. This one
  -- changes nothing.
  if not new then redis.call('ZREM', KEYS[2], '') end
  redis.call('ZADD', KEYS[4], int(now + ttl), id)
  if redis.call('PTTL', KEYS[2]) < 2 * ttl or redis.call('PTTL', KEYS[4]) < 2 * ttl then
    if budget >= 100 then drop(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', int(now), 'LIMIT', 0, 100)) end
    place = redis.call('ZRANK', KEYS[2], id)
    local lasts = math.max(redis.call('PTTL', KEYS[4]), 3 * ttl)
    redis.call('PEXPIRE', KEYS[2], int(math.max(redis.call('PTTL', KEYS[2]), lasts)))
    redis.call('PEXPIRE', KEYS[4], int(lasts))
  end
  return place, new
end

-- asked_lately reports whether any of the first n requests in the queue has asked so recently that
-- its process must be alive: a live head asks again within that time. Then a writer that owns the
-- lock was notified that others wait: by that one, by an earlier head, or by the message that granted
-- the lock. A request that came to the front of a long queue during a pause asks later,
-- and until then the owner is notified more often than necessary.
local function asked_lately(n)
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, n - 1)) do
    local _, ttl = parse_id(id)
    local left = (tonumber(redis.call('ZSCORE', KEYS[4], id) or 0) or 0) - now
    if ttl and left > ttl - math.min(ttl / 2, 5000) then return true end
  end
  return false
end

local GRANTED, QUEUED, REFUSED, NOT_OURS, DONE = 1, 2, 3, 4, 5

-- granted_reply returns {GRANTED, token, time, 1 if others wait, how many others were made
-- owner, unfinished, kept, old_gone, echo}. kept is 1 if the id owned the lock already and its lease
-- was extended, 2 if in addition its token was not remembered. echo is how many received the echo to
-- the inbox, -1 if none was requested, -2 if it, or another message, was denied.
local function granted_reply(token, kept, echoed)
  return { GRANTED, token, us, redis.call('EXISTS', KEYS[2]), handed, unfinished, kept or 0, old_gone,
    denied and -2 or echoed or -1 }
end

-- waiting_reply returns {QUEUED or REFUSED, last token, time, place, remaining ms of the
-- owner's lease (-1 if it does not end, -2 if there is none), who blocks the request, 1 if the
-- blocker will not notify us, echo, how many requests were made owner, unfinished, upto, old_gone}.
-- echo is that of granted_reply; upto is what notify_owners returned. A foreign value may be as large as it
-- likes; 300 bytes are more than an id has.
local function waiting_reply(kind, place, echoed, upto)
  local blocker = value
  if blocker == MARK then blocker = redis.call('ZREVRANGE', KEYS[3], '0', '0')[1] end
  last_token()
  blocker = blocker or newer_meta or redis.call('ZRANGE', KEYS[2], '0', '0')[1] or ''
  local no_notify = (value and value ~= MARK and not parse_id(value) and not cooldown_of(value)) or is_newer(blocker) or newer_meta
  return { kind, last, us, place, redis.call('PTTL', KEYS[1]), string.sub(blocker, 1, 300), no_notify and 1 or 0,
    denied and -2 or echoed, handed, unfinished, upto, old_gone }
end

-- mark_of_server returns the mark of a server of a quorum (see vote_before.lua), as vote_after.lua
-- would set it.
local function mark_of_server()
  local mark = tonumber(redis.call('GET', KEYS[6]))
  return mark and mark <= us and mark or us
end

-- refuse answers a request about an id that does not own the lock. Its write removes a reader that
-- is still listed although the marker is gone, and changes nothing else. But a read-only server refuses
-- it: a demoted primary may be behind, and must not say whether the id is an owner.
local function refuse(id)
  redis.call('ZREM', KEYS[3], id)
  return { NOT_OURS, 0 }
end
