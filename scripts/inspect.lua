-- inspect(): what is known of a lock. Writes nothing.
--
-- Returns {value, PTTL, time, meta, readers with scores, queue's first 1,000,
-- queue's length}.

return {
  value or '',
  redis.call('PTTL', lock),
  us,
  redis.call('GET', meta) or '',
  redis.call('ZRANGEBYSCORE', readers, '(' .. int(now), '+inf', 'WITHSCORES'),
  redis.call('ZRANGE', queue, 0, 999),
  redis.call('ZCARD', queue),
}
