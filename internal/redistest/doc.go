// Package redistest gives tests and internal tools a Redis to talk to, and the means to
// break it.
//
// Its limits: a real server is available only where a redis-server program is installed
// or LEASED_REDIS_SERVER names one. Otherwise, tests that ask for a real server are
// skipped, or fail if LEASED_REQUIRE_REDIS=1 says that skipping would hide something.
// Freezing a server needs Unix signals. The embedded server has no ACL, no CONFIG and no
// CLIENT KILL, and its latency says nothing about that of a real one.
//
//   - [Server] starts a real server for one test, [Shared] one for all tests of
//     a process; [Prefix] keeps the tests on a shared server apart.
//   - [Mini] is the embedded server, usable inside a testing/synctest bubble.
//   - [OnBoth] runs one behavior suite on the embedded server and on a real one.
//   - [TLSServer] starts a server that accepts only TLS, [NewReplication] a primary with
//     replicas, [NewSentinels] the same watched by sentinels, and [NewCluster] a Cluster.
//     Each node is an [Instance] that can be killed and frozen.
//   - [Proxy] sits between a client and a server and loses what it is told to lose, or
//     is a fixed address for servers that take each other's place.
//   - [CheckLeaks] fails a test that leaves goroutines, keys or channels behind.
//   - [Strain] measures the delay that a loaded machine adds to every bound in real time.
//   - [Eventually] waits for what no event announces.
//   - [Calls] and [Counter] count commands, on the server and in the client.
package redistest
