-- Turns the arguments of acquire_fast.lua into those of acquire.lua and common.lua: ARGV 1 the
-- prefix of inbox channels, 2 id, 3 '0' to '4', 4 nonce or '', 5 own readers or '', 6 upto.

local space = string.find(ARGV[3], ' ', 1, true)
ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] =
  string.sub(ARGV[3], space + 1), ARGV[1], string.sub(ARGV[3], 1, 1), ARGV[4] or '', ARGV[5] or ''
