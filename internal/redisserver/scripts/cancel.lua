-- cancel(id, last token): ends a request, whether it waits, owns the lock or was never received.
--
-- KEYS  as in common.lua, and on a server of a quorum 6 its mark, see vote_before.lua
-- ARGV  2 id, 3 last token its owner assigned, or 0 if only the grant's own, 4 span, 5 for how
--       many ms a writer's lock is kept from everybody; left out if it is not. The client sends
--       the arguments of release_fast.lua, and release_arguments.lua turns them into these.
-- Returns {DONE, how many requests were made owner, 1 if the id owned the lock until now, the
-- lock's last token before others were made owner, unfinished}, on a server of a quorum with its
-- time and mark before unfinished; or, on such a server, what release_fast.lua returns, which
-- runs first there. The token is 0 if it would prove nothing: it is not remembered, the owner is
-- foreign and assigns none, or another owner may have assigned the same number. unfinished
-- is 1 if the client must send cancel again at once.
-- It always grants to the head of the queue, because readers behind a canceled writer may enter
-- now. If id had a place in the queue, the owners are notified again that others wait, because
-- readers of id's process ignored such messages while it had that place; or if nobody waits any
-- more, readers are told that, because they kept others out. If it had none, they are
-- not notified: such a message often crosses with its owner's release and is answered with a
-- cancel, and that cancel would send the next message.
-- Repeated, it finds nothing of id, and only grants to the head of the queue.

local id = ARGV[2]
local mode, ttl = parse_id(id)
span = ARGV[4]

check_types()
redis.call('ZREM', KEYS[4], id)
local waited = redis.call('ZREM', KEYS[2], id) > 0
local owned = owns(id, mode)
if owned then
  give_back(id, mode, ttl, ARGV[3], ARGV[5])
elseif mode == 'r' then
  redis.call('ZREM', KEYS[3], id)
end
local token = last_token()
if value and value ~= MARK and not parse_id(value) and not cooldown_of(value) then token = 0 end
-- A token that an owner assigned locally may have been assigned to another owner, too.
local drawn_by = string.match(redis.call('GET', KEYS[5]) or '', '^leased1:%d+:%d+:(.+)$')
if (drawn_by or ARGV[3] ~= '0') and drawn_by ~= id then token = 0 end
grant_next(nil)
notify_of_expiry(nil, (owned or waited) and 9 or 0) -- repeated, it is news for the head at most
if waited then
  if redis.call('EXISTS', KEYS[2]) == 1 then
    notify_owners('wanted')
  elseif value == MARK then
    notify_owners('unwanted')
  end
end
local answer = { DONE, handed, owned and 1 or 0, token }
if KEYS[6] then answer[5], answer[6] = us, mark_of_server() end
answer[#answer + 1] = unfinished
return answer
