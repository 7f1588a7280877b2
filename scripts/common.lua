-- Stands before every script that can change who owns a lock, behind the script's
-- shortcut if it has one.
--
-- KEYS  1 lock, 2 queue, 3 readers, 4 waiters, 5 meta (all in one slot)
-- ARGV  1 what comes before a client's name in its inbox channel; the rest is the script's own
--
-- Invariants: an owner is recorded before it is told, and what was told is never
-- taken back: a message may have been passed on to where it is not counted; nobody's
-- ownership is changed in another's name; the first write of a script that gives
-- something back is one that a full server admits (DEL, ZREM, PEXPIRE), after which
-- it admits the others; what a later format wrote is neither parsed nor
-- overwritten; each script can run twice.
--
-- The queue is a sorted set, scored by a number that grows: to find, add and remove
-- an entry costs little however many wait. Its entries' leases are in waiters.

local lock, queue, readers, waiters, meta = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local MARK = 'leased1:readers'

local value = redis.call('GET', lock)
local t = redis.call('TIME') -- once: it moves inside a script on Redis 7.0
local us = t[1] * 1000000 + t[2]
local now = math.floor(us / 1000)
local last, sealed = nil, false -- the lock's last token, read when needed; whether a later format keeps it
local link = '-' -- span of the lease that lets go
-- What one call may do, so that it stays short: 500 dead entries, or 100 grants.
-- unfinished says that it ran out first, and that somebody has to go on at once.
local budget, unfinished = 500, 0
local handed, denied = 0, false

-- tostring would lose digits from 1e14 on.
local function int(n) return string.format('%.0f', n) end

-- parse returns mode, TTL, whether a count of listeners is proof, and the client.
local function parse(id)
  local mode, ttl, proof, client = string.match(id, '^leased1:([wr]):(%d+):([cu])i?:[%w_-]+:(%S+)$')
  if not mode or #ttl > 12 or tonumber(ttl) < 1 then return nil end
  return mode, tonumber(ttl), proof == 'c', client
end

local function newer(v)
  local format = v and string.match(v, '^leased(%d+):')
  return format and tonumber(format) > 1
end

-- last_token returns the highest token that was given, 0 if nobody remembers.
local function last_token()
  if not last then
    local m = redis.call('GET', meta)
    sealed = newer(m)
    local digits = m and string.match(m, '^leased1:(%d+):')
    last = digits and #digits <= 16 and tonumber(digits) or 0
    if last > 9007199254740000 then last = 0 end
  end
  return last
end

local function remember(ttl)
  if sealed then return end
  redis.call('SET', meta, 'leased1:' .. int(last) .. ':' .. int(us), 'PX', int(math.max(600000, 4 * ttl)))
end

-- used takes over the last token that an owner gave out by itself.
local function used(token, ttl)
  token = tonumber(token) or 0
  if token > 0 and token > last_token() and token < 9007199254740000 then
    last = token
    remember(ttl)
  end
end

-- keep makes k live at least ms more.
local function keep(k, ms)
  if redis.call('PTTL', k) < ms then redis.call('PEXPIRE', k, int(ms)) end
end

-- check meets a key of another type before anything was written.
local function check()
  redis.call('ZCARD', queue)
  redis.call('ZCARD', waiters)
  redis.call('ZCARD', readers)
  last_token()
end

local function live_readers()
  redis.call('ZREMRANGEBYSCORE', readers, '-inf', int(now))
  return redis.call('ZCARD', readers)
end

-- mark keeps the readers' marker until the last live reader's lease ends, and
-- takes it away with the last reader.
local function mark()
  live_readers()
  local top = redis.call('ZREVRANGE', readers, '0', '0', 'WITHSCORES')
  if not top[1] then
    if value == MARK then
      redis.call('DEL', lock)
      value = false
    end
    return
  end
  local ends = int(math.min(tonumber(top[2]), now + 1e12)) -- it can be anything, even inf
  if value ~= MARK then
    redis.call('SET', lock, MARK, 'PX', int(math.max(1, tonumber(ends) - now)))
    value = MARK
  end
  redis.call('PEXPIREAT', lock, ends)
  redis.call('PEXPIREAT', readers, ends)
end

local function owns(id, mode)
  if mode == 'w' then return value == id end
  if value ~= MARK then return false end
  local ends = redis.call('ZSCORE', readers, id)
  return ends and tonumber(ends) > now
end

-- record makes id owner under a token of its own, once the marker stands, for a
-- reader, and the token is remembered.
local function record(id, mode, ttl)
  last = math.max(last_token() + 1, us)
  if mode == 'w' then
    redis.call('SET', lock, id, 'PX', int(ttl))
    value = id
  else
    redis.call('ZADD', readers, int(now + ttl), id)
  end
  return last
end

local function own(id, mode, ttl)
  local token = record(id, mode, ttl)
  if mode == 'r' then mark() end
  remember(ttl)
  return token
end

-- disown ends what owns(id) said.
local function disown(id, mode)
  if mode == 'w' then
    redis.call('DEL', lock)
    value = false
  else
    redis.call('ZREM', readers, id)
    mark()
  end
end

-- extend gives an owner its full TTL again: a repeated request is trusted from
-- its own sending.
local function extend(id, mode, ttl)
  if mode == 'w' then
    redis.call('PEXPIRE', lock, int(ttl))
  else
    redis.call('PEXPIRE', readers, int(math.max(redis.call('PTTL', readers), ttl)))
    redis.call('ZADD', readers, int(now + ttl), id)
    mark()
  end
  if last_token() == 0 then
    last = us
    remember(ttl)
  end
  return last
end

local function free(mode)
  if value and value ~= MARK then return false end
  last_token()
  if sealed then return false end
  return mode == 'r' or live_readers() == 0
end

local function drop(ids)
  if #ids == 0 then return end
  redis.call('ZREM', queue, unpack(ids))
  redis.call('ZREM', waiters, unpack(ids))
  budget = budget - #ids
end

-- head drops what is dead at the head of the queue and returns the first live
-- entry: id, mode (nil for one of a later format), TTL, proof, client. It
-- returns false if the queue is empty, nil if the budget ran out before that.
local function head()
  local some = redis.call('ZRANGE', queue, '0', '0') -- most often it is alive
  while some[1] do
    local dead = {}
    for _, id in ipairs(some) do
      local ends = tonumber(redis.call('ZSCORE', waiters, id) or 0) or 0
      if ends > now then
        local mode, ttl, proof, client = parse(id)
        if mode or newer(id) then
          drop(dead)
          if mode and ends - now > ttl then -- the clock went back
            redis.call('PEXPIRE', waiters, int(math.max(redis.call('PTTL', waiters), ttl)))
            redis.call('ZADD', waiters, int(now + ttl), id)
          end
          return id, mode, ttl, proof, client
        end
      end
      dead[#dead + 1] = id
    end
    drop(dead)
    if budget <= 0 then
      unfinished = redis.call('EXISTS', queue)
      if unfinished == 1 then return nil end
    end
    some = redis.call('ZRANGE', queue, 0, math.min(math.max(budget, 1), 100) - 1)
  end
  return false
end

local function publish(client, text)
  local n = redis.pcall('PUBLISH', ARGV[1] .. client, 'leased1:' .. text)
  if type(n) == 'table' then
    denied = true
    return nil
  end
  return n
end

-- gone reports whether it is certain that nobody listens for a client. It is asked
-- before the client is told anything: PUBLISH tells subscribers of replicas too and
-- does not count them. An error, as where an ACL forbids to ask, is no proof.
local function gone(client)
  local n = redis.pcall('PUBSUB', 'NUMSUB', ARGV[1] .. client)
  return n[2] == 0
end

-- grant_next makes the head of the queue the owner for as long as the lock is
-- free for it, a writer alone or readers together. It returns the caller's
-- token if the caller was among them; the others are told.
local function grant_next(caller)
  local granted, longest, shared = {}, 0, false
  repeat
    local id, mode, ttl, proof, client = head()
    if not id or not mode or not free(mode) then break end
    if budget <= 0 then
      unfinished = 1
      break
    end
    redis.call('ZREM', queue, id)
    redis.call('ZREM', waiters, id)
    budget = budget - 5
    local here = id == caller or not proof or not gone(client)
    if here then
      granted[#granted + 1] = { id, client, record(id, mode, ttl) }
      longest, shared = math.max(longest, ttl), mode == 'r'
    end
  until here and mode == 'w'
  if #granted == 0 then return nil end
  if shared then mark() end
  remember(longest)
  local won, more = nil, redis.call('EXISTS', queue)
  for _, g in ipairs(granted) do
    if g[1] == caller then
      won = g[3]
    else
      handed = handed + 1
      publish(g[2], 'granted ' .. int(g[3]) .. ' ' .. int(us) .. ' ' .. more .. ' ' .. link .. ' ' .. g[1] .. ' ' .. lock)
    end
  end
  return won
end

-- tell sends a message to every owner but one. Of many readers it tells about 100,
-- those whose leases end first after a given time, and returns up to when, for the
-- next call to go on there, or 0 if there are no more. It goes by time and not by
-- rank, for those who were told leave: then nobody is passed over.
local function tell(what, but, after)
  if value == MARK then
    local ids = redis.call('ZRANGEBYSCORE', readers, '(' .. int(math.max(after or 0, now)), '+inf', 'LIMIT', 0, 100)
    local till = 0
    if #ids == 100 then
      local ends = redis.call('ZSCORE', readers, ids[100])
      for _, id in ipairs(redis.call('ZRANGEBYSCORE', readers, ends, ends)) do ids[#ids + 1] = id end
      if (tonumber(ends) or math.huge) < 9007199254740000 and redis.call('ZCOUNT', readers, '(' .. ends, '+inf') > 0 then
        till = math.ceil(tonumber(ends))
      end
    end
    local told = {}
    for _, id in ipairs(ids) do
      local mode, _, _, client = parse(id)
      if mode and id ~= but and not told[id] then publish(client, what .. ' ' .. id .. ' ' .. lock) end
      told[id] = true
    end
    return till
  end
  if value then
    local mode, _, _, client = parse(value)
    if mode then publish(client, what .. ' ' .. value .. ' ' .. lock) end
  end
  return 0
end

-- hasten tells who waits at the head when the last reader's lease ends by itself:
-- those who would have let go later are gone.
local function hasten()
  if value ~= MARK then return end
  local id, mode, _, _, client = head()
  if mode then publish(client, 'ends ' .. redis.call('PTTL', lock) .. ' ' .. id .. ' ' .. lock) end
end

-- clamp cuts an owner's lease that is longer than its own id says: the server's
-- clock went back. A foreign owner's is not ours to judge.
local function clamp()
  if value == MARK or not value then
    local cut = false
    local all = redis.call('ZREVRANGE', readers, 0, 99, 'WITHSCORES')
    for i = 1, #all, 2 do
      local _, ttl = parse(all[i])
      if ttl and tonumber(all[i + 1]) - now > ttl then
        redis.call('ZREM', readers, all[i]) -- a first write that a full server admits
        redis.call('ZADD', readers, int(now + ttl), all[i])
        cut = true
      elseif not ttl and not newer(all[i]) then
        redis.call('ZREM', readers, all[i])
        cut = true
      end
    end
    if cut then mark() end
  else
    local _, ttl = parse(value)
    if ttl and redis.call('PTTL', lock) > ttl then redis.call('PEXPIRE', lock, int(ttl)) end
  end
end

-- enqueue lets id wait: once, at the tail, for one more TTL. It returns the
-- place and whether id is new there.
local function enqueue(id, ttl)
  local place = redis.call('ZRANK', queue, id)
  local new = not place
  if new then
    local top = redis.call('ZREVRANGE', queue, '0', '0', 'WITHSCORES')[2]
    redis.call('ZADD', queue, int((tonumber(top or 0) or 0) + 1), id)
    place = redis.call('ZCARD', queue) - 1
  end
  redis.call('PEXPIRE', queue, int(math.max(redis.call('PTTL', queue), 3 * ttl)))
  redis.call('PEXPIRE', waiters, int(math.max(redis.call('PTTL', waiters), 3 * ttl)))
  redis.call('ZREMRANGEBYSCORE', waiters, '-inf', int(now)) -- of those who wait no more
  redis.call('ZADD', waiters, int(now + ttl), id)
  keep(waiters, 3 * ttl)
  return place, new
end

local GRANTED, QUEUED, REFUSED, NOT_OURS, DONE = 1, 2, 3, 4, 5

-- {GRANTED, token, time, others wait, how many others were made owner, unfinished, 1
-- if it owned already and was extended}
local function granted_reply(token, extended)
  return { GRANTED, token, us, redis.call('EXISTS', queue), handed, unfinished, extended or 0 }
end

-- {QUEUED or REFUSED, last token, time, place, remaining ms of the owner (-1
-- endless, -2 none), who blocks, 1 if that one will not tell us, inbox echo: -1
-- not asked, -2 denied, else receivers, how many were made owner, unfinished, up to
-- where readers were told, 0 if all were}
local function waiting_reply(kind, place, echoed, told)
  local blocker = value
  if blocker == MARK then blocker = redis.call('ZREVRANGE', readers, '0', '0')[1] end
  blocker = blocker or redis.call('ZRANGE', queue, '0', '0')[1] or ''
  last_token()
  local mute = (value and value ~= MARK and not parse(value)) or newer(blocker) or sealed
  return { kind, last, us, place, redis.call('PTTL', lock), blocker, mute and 1 or 0, denied and -2 or echoed, handed, unfinished, told }
end

-- refuse answers one that owns nothing to give back or keep. What it writes changes
-- nothing, but is refused by a server that is read-only and may be behind: one that
-- was primary must not say what became of the lock.
local function refuse(id)
  redis.call('ZREM', readers, id)
  return { NOT_OURS, 0 }
end
