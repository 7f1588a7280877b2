-- release(id, last token): the owner lets go and the next becomes owner.
--
-- ARGV  2 id, 3 last token the owner gave out, 0 if only the grant's own, 4 span
-- Returns {DONE, how many were made owner, unfinished} or {NOT_OURS, 0}, or what
-- release_usual.lua does.

local id = ARGV[2]
local mode, ttl = parse(id)
link = ARGV[4]

local waiting = redis.call('EXISTS', queue) == 1
if waiting or ARGV[3] ~= '0' then check() end
if not owns(id, mode) then return refuse(id) end
disown(id, mode)
used(ARGV[3], ttl)
if waiting then
  grant_next(nil)
  hasten()
end
return { DONE, handed, unfinished }
