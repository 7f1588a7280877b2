-- cancel(id, last token): the request ends, whatever became of it.
--
-- ARGV  2 id, 3 last token given out under it, 4 span
-- Returns {DONE, how many were made owner, 1 if the id owned the lock until now, the
-- lock's last token before others were made owner, unfinished}. The token is 0 where it
-- proves nothing: nobody remembers, or a foreign owner is there, who leaves none. The
-- last number says whether cancel has to be sent again at once.
-- Always looks for the next owner: readers behind a cancelled writer may enter now. If
-- it gave up a place, owners hear again that somebody waits: those with a place behind
-- themselves take no notice while they have it. Otherwise they do not: such a message
-- often crosses with its owner's release, is answered with cancel, and that would send
-- the next one.

local id = ARGV[2]
local mode, ttl = parse(id)
link = ARGV[4]

check()
redis.call('ZREM', waiters, id)
local waited = redis.call('ZREM', queue, id) > 0
local owned = owns(id, mode)
if owned then
  disown(id, mode)
  used(ARGV[3], ttl)
elseif mode == 'r' then
  redis.call('ZREM', readers, id)
end
local token = last_token()
if value and value ~= MARK and not parse(value) then token = 0 end
grant_next(nil)
hasten()
if waited and redis.call('EXISTS', queue) == 1 then tell('wanted') end
return { DONE, handed, owned and 1 or 0, token, unfinished }
