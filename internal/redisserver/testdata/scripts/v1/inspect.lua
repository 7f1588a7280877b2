-- inspect(): returns what Redis stores about a lock. It writes nothing.
--
-- KEYS  as in common.lua
-- Returns {value, PTTL, time, meta, live readers with scores, those of the first 1,000 of the
-- queue that are alive, how many of the whole queue are}.

local queue, length = redis.call('ZRANGE', KEYS[2], 0, 999), redis.call('ZCARD', KEYS[2])
local live = redis.call('ZCOUNT', KEYS[4], '(' .. int(now), '+inf')
if live < length then
  local all = queue
  queue, length = {}, live
  for _, id in ipairs(all) do
    if (tonumber(redis.call('ZSCORE', KEYS[4], id)) or 0) > now then queue[#queue + 1] = id end
  end
end

return {
  value or '',
  redis.call('PTTL', KEYS[1]),
  us,
  redis.call('GET', KEYS[5]) or '',
  redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. int(now), '+inf', 'WITHSCORES'),
  queue,
  length,
}
