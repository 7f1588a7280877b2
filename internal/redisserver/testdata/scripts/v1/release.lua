-- release(id, last token): the owner gives the lock back, and the head of the queue gets it.
--
-- KEYS  as in common.lua
-- ARGV  2 id, 3 last token the owner assigned, 0 if only the grant's own, 4 span, 5 for how
--       many ms a writer's lock is kept from all others; left out for none
-- Returns {DONE, how many were made owner, unfinished} or {NOT_OURS, 0}, or what
-- release_fast.lua returns.
-- Repeated, it finds that id does not own and changes nothing. It never releases what
-- another id owns.

local id = ARGV[2]
local mode, ttl = parse_id(id)
span = ARGV[4]

local waiting = redis.call('EXISTS', KEYS[2]) == 1
if waiting or ARGV[3] ~= '0' or ARGV[5] then check_types() end
if not owns(id, mode) then return refuse(id) end
give_back(id, mode, ttl, ARGV[3], ARGV[5])
if waiting then
  grant_next(nil)
  notify_head_of_expiry()
end
return { DONE, handed, unfinished }
