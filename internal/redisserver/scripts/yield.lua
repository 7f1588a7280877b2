-- yield(old, new, last token): the owner gives the lock back and waits again, under a new
-- id, behind all requests that wait already.
--
-- KEYS  as in common.lua, and on a server of a quorum 6 its mark, see vote_before.lua
-- ARGV  2 old id, 3 new id, which has never owned the lock and may wait already, 4 last token
--       the owner assigned, or 0 if only the grant's own, 5 span, 6 for how many ms a writer's
--       lock is kept from everybody; left out if it is not
-- Returns granted_reply or waiting_reply for new, with old_gone set if old does not own the lock,
-- or {NOT_OURS, 0} (on a server of a quorum {NOT_OURS, 0, time, mark}) if in addition new neither
-- owns it nor waits.
-- Repeated, it finds that old does not own the lock: then it returns the state of new, and
-- enqueues and grants nothing.

local old, new = ARGV[2], ARGV[3]
local mode, ttl = parse_id(old)
local new_mode, new_ttl = parse_id(new)
span = ARGV[5]

check_types()
if owns(old, mode) then
  give_back(old, mode, ttl, ARGV[4], ARGV[6])
  local place = enqueue(new, new_ttl)
  local token = grant_next(new)
  if token then return granted_reply(token) end
  place = redis.call('ZRANK', KEYS[2], new) or place
  notify_of_expiry(new, 9)
  -- An owner that was made here knows from granted that others wait.
  return waiting_reply(QUEUED, place, -1, handed == 0 and notify_owners('wanted') or 0)
end
local not_ours = refuse(old)
old_gone = 1
if owns(new, new_mode) then return granted_reply(extend(new, new_mode, new_ttl)) end
if redis.call('ZRANK', KEYS[2], new) then
  return waiting_reply(QUEUED, enqueue(new, new_ttl), -1, 0)
end
if KEYS[6] then not_ours[3], not_ours[4] = us, mark_of_server() end
return not_ours
