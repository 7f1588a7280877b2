-- evict(): whoever owns the lock, of whatever kind, does so no longer.
--
-- Returns {last token, how many of the evicted were told, unfinished, the ids or
-- values that were evicted}. Owners of ours are told, with the token that tells this
-- from an eviction of an earlier grant: the first 100 here, the rest by the caller.

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
local revoked = last_token()
local told = math.min(#owners, 100)
for i = 1, told do
  local mode, _, _, client = parse(owners[i])
  if mode then publish(client, 'revoked ' .. int(revoked) .. ' ' .. owners[i] .. ' ' .. lock) end
end
grant_next(nil)
return { revoked, told, unfinished, owners }
