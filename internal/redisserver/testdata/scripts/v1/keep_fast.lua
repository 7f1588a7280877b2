-- The common case of release on a server of a quorum in fewer calls, where another server
-- gave the owner its token: a writer gives the lock back, nothing waits, and the token is
-- kept here, too. In any other case it writes nothing, and release_fast.lua follows.
--
-- KEYS, ARGV  as in release.lua
-- Returns 0, as release_fast.lua does.
--
-- It repeats give_back of common.lua. TestTheShortcutsOfAVoteDoWhatTheLongWayDoes compares
-- the two.

local ttl = ARGV[3] ~= '0' and not ARGV[5] and string.match(ARGV[2], '^leased1:w:([1-9]%d*):')
if ttl and #ttl <= 9 and redis.call('EXISTS', KEYS[2]) == 0 and redis.call('GET', KEYS[1]) == ARGV[2] then
  local last = string.match(redis.call('GET', KEYS[5]) or '', '^leased1:(%d+):')
  local t = redis.call('TIME')
  local us = t[1] * 1000000 + t[2]
  -- equally long digits compare like numbers; a token ahead of the clock is kept for longer
  if last and #last == 16 and #ARGV[3] == 16 and last < ARGV[3] and us - ARGV[3] > 0 then
    redis.call('DEL', KEYS[1])
    redis.call('SET', KEYS[5], string.format('leased1:%s:%.0f:%s', ARGV[3], us, ARGV[2]),
      'PX', #ttl < 6 and '600000' or math.max(600000, 4 * ttl))
    return 0
  end
end
