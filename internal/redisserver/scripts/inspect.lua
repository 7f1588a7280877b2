-- inspect(): returns what Redis stores about a lock. It writes nothing.
--
-- KEYS  as in common.lua
-- Returns {value, PTTL, time, meta, live readers with scores, the first 1,000 of the queue,
-- the queue's length}.

return {
  value or '',
  redis.call('PTTL', KEYS[1]),
  us,
  redis.call('GET', KEYS[5]) or '',
  redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. int(now), '+inf', 'WITHSCORES'),
  redis.call('ZRANGE', KEYS[2], 0, 999),
  redis.call('ZCARD', KEYS[2]),
}
