-- release(id, last token): the owner gives the lock back, and the head of the queue becomes owner.
--
-- KEYS  as in common.lua, and on a server of a quorum 6 its mark, see vote_before.lua
-- ARGV  2 id, 3 last token the owner assigned, or 0 if only the grant's own, 4 span, 5 for how
--       many ms a writer's lock is kept from everybody; left out if it is not. The client sends
--       the arguments of release_fast.lua, and release_arguments.lua turns them into these.
-- Returns {DONE, how many requests were made owner, unfinished}, or {NOT_OURS, 0} (on a server of
-- a quorum {NOT_OURS, 0, time, mark}), or what release_fast.lua returns.
-- Repeated, it finds that id does not own the lock, and changes nothing that matters (see refuse). It
-- never releases a lock that another id owns.

local id = ARGV[2]
local mode, ttl = parse_id(id)
span = ARGV[4]

local waiting = redis.call('EXISTS', KEYS[2]) == 1
if waiting or ARGV[3] ~= '0' or ARGV[5] then check_types() end
if not owns(id, mode) then
  local answer = refuse(id)
  if KEYS[6] then answer[3], answer[4] = us, mark_of_server() end
  return answer
end
give_back(id, mode, ttl, ARGV[3], ARGV[5])
if waiting then
  grant_next(nil)
  notify_of_expiry(nil, 9)
end
return { DONE, handed, unfinished }
