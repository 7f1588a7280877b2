-- Put around acquire, yield and downgrade on a server of a quorum (with vote_after.lua).
--
-- KEYS  6 the mark of when the server was first seen without data
-- Returns {mark in microseconds, what the script returns}.
-- Whoever misses the mark sets it: then the server has restarted without its data, and may
-- have forgotten owners. A mark ahead of the clock, which was set back, is set anew.

local function operate()
