-- renew(id): a writer keeps what it owns for another TTL.
--
-- KEYS  1 lock: one key, for a slot in migration refuses scripts that name more
-- ARGV  1 id, 2 TTL in ms
-- Returns the server's time in microseconds, or 0 if id does not own the lock; an
-- error where the server admits no writes.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  -- Only a server that admits writes may say so: one that was primary can be behind.
  -- To a string or to nothing this write does nothing, whosever it is.
  local n = redis.pcall('ZREM', KEYS[1], ARGV[1])
  if type(n) == 'table' and not string.find(n.err, 'WRONGTYPE') then return n end
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local t = redis.call('TIME')
return t[1] * 1000000 + t[2]
