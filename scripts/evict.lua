-- evict(): whoever owns the lock, of whatever kind, does so no longer.
--
-- Returns the ids or values that were evicted. Owners of ours are told, with
-- the token that tells this from an eviction of an earlier grant.

check()
local owners = {}
if value == MARK or not value then
  live_readers()
  owners = redis.call('ZRANGE', readers, 0, -1)
else
  owners = { value }
end
redis.call('DEL', lock)
redis.call('DEL', readers)
value = false
for _, id in ipairs(owners) do
  local mode, _, _, client = parse(id)
  if mode then publish(client, 'revoked ' .. int(last_token()) .. ' ' .. id .. ' ' .. lock) end
end
grant_next(nil)
return owners
