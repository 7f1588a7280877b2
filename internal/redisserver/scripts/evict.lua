-- evict(): takes the lock from its owners, whoever they are, including foreign ones.
--
-- KEYS  as in common.lua
-- ARGV  2 on a quorum, a token that the next owner's must exceed, as the servers together know, or '0';
--       '' on a single server, 3 the value that the lock's own key must have for anybody to be evicted,
--       or '' for any
-- Returns {last token, how many of the evicted were notified, unfinished, the ids or values
-- that were evicted}. Owners of this format are notified, the first 100 here and the others by
-- the client. The message carries the token, which tells this eviction from that of an earlier grant.
-- Repeated, it evicts the owners that there are by then. It never removes a live waiter.

check_types()
if ARGV[3] and ARGV[3] ~= '' and ARGV[3] ~= value then return { last_token(), 0, unfinished, {} } end
local owners = {}
if value == MARK or not value then
  live_readers()
  owners = redis.call('ZRANGE', KEYS[3], 0, -1)
else
  owners = { value }
end
redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[3])
value = false
local revoked = last_token()
local least = tonumber(ARGV[2])
if least then
  -- Who is evicted may have entered since that token was found, and its own may be of another server:
  -- ahead of this one's clock, by as much as a quorum does not write back; see slack in internal/quorum.
  local longest = 0
  for i = 1, #owners do
    local _, ttl = parse_id(owners[i])
    longest = math.max(longest, ttl or 0)
  end
  if longest > 0 then least = math.max(least, us + 5 * longest + 1000) end
  if least > last then
    last = least
    remember(longest)
  end
end
local notified = math.min(#owners, 100)
for i = 1, notified do
  local mode, _, _, client = parse_id(owners[i])
  if mode then publish(client, 'revoked ' .. int(revoked) .. ' ' .. owners[i] .. ' ' .. lock) end
end
grant_next(nil)
return { revoked, notified, unfinished, owners }
