-- inspect(): returns what Redis stores about a lock. It writes nothing.
--
-- KEYS  as in common.lua
-- Returns {value, PTTL, time, meta, live readers with scores, those of the first 1,000 of the
-- queue that are alive, how many of the whole queue are}.

local queue, dead = redis.call('ZRANGE', KEYS[2], 0, 999), redis.call('ZCOUNT', KEYS[4], '-inf', int(now))
local alive = dead == 0 and queue or {}
if dead > 0 then
  for _, id in ipairs(queue) do
    if (tonumber(redis.call('ZSCORE', KEYS[4], id)) or math.huge) > now then alive[#alive + 1] = id end
  end
end

return {
  value or '',
  redis.call('PTTL', KEYS[1]),
  us,
  redis.call('GET', KEYS[5]) or '',
  redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. int(now), '+inf', 'WITHSCORES'),
  alive,
  math.max(#alive, redis.call('ZCARD', KEYS[2]) - dead),
}
