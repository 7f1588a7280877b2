-- Put around acquire, yield and downgrade on a server of a quorum (with vote_after.lua).
--
-- KEYS  6 the mark of when the server was first seen without data
-- ARGV  the last one: the ticket, by which the request is placed in the queue. It is the same
--       on all servers of the quorum, and so is the order of those that wait.
-- Returns {mark in microseconds, what the script returns}.
-- If the mark is missing, the script sets it: the server has restarted without its data, and
-- may have forgotten owners. A mark that is ahead of the clock, because the clock was set back,
-- is set anew.

KEYS.ticket = table.remove(ARGV)
local function operate()
