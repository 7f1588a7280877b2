// Package redistest gives tests and internal tools a Redis to talk to, and the
// means to break it.
//
// What it does not promise: a real server exists only where a redis-server
// program is installed, or LEASED_REDIS_SERVER names one; without it, tests that
// ask for one are skipped (or fail, when LEASED_REQUIRE_REDIS=1 says that skipping
// would hide something). Freezing a server needs Unix signals. The embedded server
// has no ACL, no CONFIG and no CLIENT KILL, and its latency says nothing about a
// real one's.
//
//   - [Server] starts a real server for one test, [Shared] one for all tests of
//     a process; [Prefix] keeps tests on a shared server apart.
//   - [Mini] is the embedded server, usable inside a testing/synctest bubble.
//   - [OnBoth] runs one behaviour suite on the embedded and on a real server.
//   - [TLSServer] has TLS alone, [NewReplication] replicas, [NewSentinels] sentinels
//     that watch it, and [NewCluster] is a Cluster; each node is an [Instance] that can
//     be killed and frozen.
//   - [Proxy] stands between a client and a server and loses what it is told to, or is
//     a fixed name for servers that take each other's place.
//   - [CheckLeaks] fails a test that leaves goroutines, keys or channels behind.
//   - [Strain] measures what a loaded machine adds to every bound in real time.
//   - [Calls] and [Counter] count commands, on the server and in the client.
package redistest
