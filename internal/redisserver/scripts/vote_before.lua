-- Wraps acquire, yield and downgrade on a server of a quorum, together with vote_after.lua.
--
-- KEYS  6 the mark: when the server was first seen without data
-- ARGV  the last one: the ticket, which determines the request's place in the queue. It is the
--       same on all servers of the quorum, and so is the order of the waiting requests, but for
--       those of one instant (see enqueue).
-- Returns {mark in microseconds, what the script returns}.
-- If the mark is missing, the script sets it: the server has restarted without its data, and
-- may have forgotten owners. It also replaces a mark that is ahead of the clock, because then the
-- clock was set back.

KEYS.ticket = table.remove(ARGV)
local function operate()
