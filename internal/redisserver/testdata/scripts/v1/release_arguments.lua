-- Turns the arguments of release_fast.lua into those of release.lua, cancel.lua and common.lua:
-- ARGV 1 the prefix of inbox channels, 2 id, 3 last token or '0', 4 span, 5 cool-down.

local space = string.find(ARGV[2], ' ', 1, true)
ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] =
  string.sub(ARGV[2], space + 1), ARGV[1], ARGV[3] or '0', string.sub(ARGV[2], 1, space - 1), ARGV[4]
