-- acquire(id, wait): become owner, or wait in the queue.
--
-- ARGV  2 id, 3 '1' to wait, 4 nonce for an echo to the asker's inbox or '',
--       5 the id's TTL in ms, 6 how long to remember the token,
--       7 id of the asker's own readers, who need not be told that it waits, or '',
--       8 up to where readers were told by the asker's call before, none if that told all
-- Returns granted_reply or waiting_reply (common.lua), or what acquire_free.lua does.
-- An owner that asks again keeps the lock and gets its full TTL.

local id = ARGV[2]
local mode, ttl, _, client = parse(id)

check()
local echoed = -1
if ARGV[4] ~= '' then echoed = publish(client, 'echo ' .. ARGV[4]) or -2 end
if owns(id, mode) then return granted_reply(extend(id, mode, ttl)) end
if mode == 'r' and redis.call('ZSCORE', readers, id) then redis.call('ZREM', readers, id) end -- its marker is gone, so it owns no more

clamp()
local won = grant_next(id)
if not won and free(mode) and head() == false then won = own(id, mode, ttl) end
if won then return granted_reply(won) end
if ARGV[3] ~= '1' then return waiting_reply(REFUSED, redis.call('ZCARD', queue), echoed, 0) end

local place, new = enqueue(id, ttl)
local told, after = 0, tonumber(ARGV[8]) or 0
if new or place == 0 or after > 0 then told = tell('wanted', ARGV[7], after) end
return waiting_reply(QUEUED, place, echoed, told)
