-- acquire(id, wait): become owner, or wait in the queue; or as an owner, ask whether others wait.
--
-- KEYS  as in common.lua
-- ARGV  2 id, 3 '0' not to wait, '1' to wait, '2' to wait with an id that was never sent
--       before, '3' to wait after a brief re-check (recheck_fast.lua), '4' for the question of
--       an owner, 4 nonce for an echo to the caller's inbox or '', 5 id of the caller's own
--       readers, which are not notified that it waits, or '', 6 the time up to which the
--       previous call notified readers; left out if it notified all of them. The client sends
--       the arguments of acquire_fast.lua, and acquire_arguments.lua turns them into these.
-- Returns granted_reply or waiting_reply (common.lua), or what a shortcut returns; to an owner's
-- question of an id that does not own, what refuse returns.
-- Repeated by an owner, it keeps the lock and extends it to the full TTL; repeated by a
-- waiter, it keeps the place and extends its waiting lease. It never passes a live waiter.
-- Repeated by a reader that owns, it also drops dead requests at the head of the queue and lets in the
-- readers behind them, so that no dead request counts as one that waits.

local id = ARGV[2]
local mode, ttl, _, client = parse_id(id)

check_types()
local echoed = -1
if ARGV[4] ~= '' then echoed = publish(client, 'echo ' .. ARGV[4]) or -2 end
if owns(id, mode) then
  local token, kept = extend(id, mode, ttl)
  if mode == 'r' then grant_next(nil) end
  return granted_reply(token, kept, echoed)
end
if ARGV[3] == '4' then return refuse(id) end
-- The marker is gone, so a reader that is still listed no longer owns the lock.
if mode == 'r' and redis.call('ZSCORE', KEYS[3], id) then redis.call('ZREM', KEYS[3], id) end

clamp()
local token = grant_next(id)
if not token and free(mode) and head() == false then token = make_owner(id, mode, ttl) end
if token then return granted_reply(token, 0, echoed) end
if ARGV[3] == '0' then
  redis.call('ZREM', KEYS[2], '') -- changes nothing; a demoted primary, which may be behind, refuses it
  return waiting_reply(REFUSED, redis.call('ZCARD', KEYS[2]), echoed, 0)
end

local place, new = enqueue(id, ttl)
local forgotten = new and ARGV[3] ~= '2' -- it was sent before, and has lost its place
local upto, after = 0, tonumber(ARGV[6]) or 0
-- A writer that owns was notified by granted, or when the queue was empty. The head repeats it. But a
-- failover can undo a release, and the end of a wait: then the owner and the head are ids that their
-- processes have forgotten. So whoever finds that its request was forgotten notifies the owner, whose process
-- gives the lock back, and where the head does not ask, the first behind it that does is in its place.
if place == 0 or after > 0 or forgotten or new and value == MARK
  or not asked_lately(new and 1 or math.min(place, 10)) then
  upto = notify_owners('wanted', ARGV[5], after)
end
return waiting_reply(QUEUED, place, echoed, upto)
