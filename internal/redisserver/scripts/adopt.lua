-- adopt(id, token): stores a token that another server of a quorum gave the owner.
--
-- KEYS  as in common.lua
-- ARGV  2 id, 3 token
-- Returns {DONE, 0, 0} or {NOT_OURS, 0}.
-- Repeated, it changes nothing. It never lowers the lock's last token.

local id = ARGV[2]
local mode, ttl = parse_id(id)

check_types()
if not owns(id, mode) then return refuse(id) end
redis.call('ZREM', KEYS[3], '') -- a first write that a full server admits; it changes nothing
adopt_token(ARGV[3], ttl, id)
return { DONE, 0, 0 }
