-- downgrade(old, new, last token): turns a writer into a reader, in one step, so that no other
-- writer can get in between.
--
-- KEYS  as in common.lua
-- ARGV  2 old id, 3 new id of a reader, never used before, 4 last token the owner assigned,
--       or 0 if only the grant's own, 5 span
-- Returns granted_reply for new, or {NOT_OURS, 0} if neither id owns the lock. Readers at the
-- head of the queue are made owners, too.
-- Repeated, it finds that new owns the lock, and extends its lease. It never enqueues anything.

local old, new = ARGV[2], ARGV[3]
local mode, ttl = parse_id(old)
local new_mode, new_ttl = parse_id(new)
span = ARGV[5]

check_types()
if owns(old, mode) then
  -- The first write must be one that a full server admits. old is not cleared before new
  -- has replaced it: if an ACL forbids one of the following commands, old still owns the lock.
  redis.call('PEXPIRE', KEYS[1], int(ttl))
  adopt_token(ARGV[4], ttl, old)
  local token = make_owner(new, new_mode, new_ttl)
  grant_next(nil)
  return granted_reply(token)
end
if owns(new, new_mode) then return granted_reply(extend(new, new_mode, new_ttl)) end
return refuse(old)
