-- renew_shared(id): a reader extends its lease to another TTL.
--
-- KEYS  1 lock, 2 readers
-- ARGV  1 id, 2 TTL in ms
-- Returns the server's time in microseconds, or 0 if id does not own the lock: a reader is
-- an owner as long as its own expiry is in the future and the marker exists.
-- Repeated, it extends the lease once more. It never extends another reader's lease, or restores
-- the marker.
--
-- It does not load common.lua, so its last lines repeat sync_marker for a reader that is an owner.

local t = redis.call('TIME')
local us = t[1] * 1000000 + t[2]
local now = math.floor(us / 1000)
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
if redis.call('GET', KEYS[1]) ~= 'leased1:readers' or not ends or tonumber(ends) <= now then
  redis.call('ZREM', KEYS[2], ARGV[1]) -- a write, so that a read-only server gives no answer
  return 0
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
local top = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
local till = string.format('%.0f', math.min(tonumber(top[2]), now + 1e12))
redis.call('PEXPIREAT', KEYS[1], till)
redis.call('PEXPIREAT', KEYS[2], till)
return us
