-- renew(id): a writer extends the lock it owns to another TTL.
--
-- KEYS  1 lock: only one key, because a slot in migration refuses scripts that name several
-- ARGV  1 id, 2 TTL in ms
-- Returns the server's time in microseconds, or 0 if id does not own the lock; an error if
-- the server admits no writes.
-- Repeated, it extends the lock once more. It never extends a lock that another id owns.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  -- Only a server that admits writes may answer that id does not own the lock, because a demoted
  -- primary can be behind. On a string or a missing key this write does nothing, whoever is owner.
  local n = redis.pcall('ZREM', KEYS[1], ARGV[1])
  if type(n) == 'table' and not string.find(n.err, 'WRONGTYPE') then return n end
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local t = redis.call('TIME')
return t[1] * 1000000 + t[2]
