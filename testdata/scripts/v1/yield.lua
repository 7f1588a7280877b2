-- yield(old, new, last token): the owner lets go and waits again, behind all
-- who wait already.
--
-- ARGV  2 old id, 3 new id, which never owned and may wait already, 4 last token given out, 5 span
-- Returns granted_reply or waiting_reply for new, with a 1 behind it if old does not
-- own, or {NOT_OURS, 0} if besides new is unknown. A copy that runs late finds old gone
-- and enqueues nothing.

local old, new = ARGV[2], ARGV[3]
local mode, ttl = parse(old)
local new_mode, new_ttl = parse(new)
link = ARGV[5]

check()
if owns(old, mode) then
  disown(old, mode)
  used(ARGV[4], ttl)
  local place = enqueue(new, new_ttl)
  local won = grant_next(new)
  if won then return granted_reply(won) end
  place = redis.call('ZRANK', queue, new) or place
  return waiting_reply(QUEUED, place, -1, tell('wanted'))
end
local reply = refuse(old)
if owns(new, new_mode) then
  reply = granted_reply(extend(new, new_mode, new_ttl))
elseif redis.call('ZRANK', queue, new) then
  local place = enqueue(new, new_ttl)
  reply = waiting_reply(QUEUED, place, -1, 0)
else
  return reply
end
reply[#reply + 1] = 1
return reply
