-- downgrade(old, new, last token): a writer becomes a reader, with no gap in
-- which another could write.
--
-- ARGV  2 old id, 3 new id of a reader, never used before, 4 last token given out, 5 span
-- Returns granted_reply for new, or {NOT_OURS, 0} if neither owns. Readers at the
-- head of the queue are let in too.

local old, new = ARGV[2], ARGV[3]
local mode, ttl = parse(old)
local new_mode, new_ttl = parse(new)
link = ARGV[5]

check()
if owns(old, mode) then
  -- A first write that a full server admits. old is not cleared before new stands
  -- in its place: where an ACL forbids what follows, it goes on owning.
  redis.call('PEXPIRE', lock, int(ttl))
  used(ARGV[4], ttl)
  local token = own(new, new_mode, new_ttl)
  grant_next(nil)
  return granted_reply(token)
end
if owns(new, new_mode) then return granted_reply(extend(new, new_mode, new_ttl)) end
return refuse(old)
