// Package leasedtest tests code that locks with package leased, without Redis.
//
//	func TestPay(t *testing.T) {
//		client := leasedtest.New(t) // a *leased.Client with a server of its own, in memory
//		if err := payInvoice(t.Context(), client, 42); err != nil {
//			t.Fatal(err)
//		}
//	}
//
// Nothing of the library is imitated: the client is what [leased.New] returns, and the
// embedded server, miniredis, runs the same scripts as Redis does. The library's own
// behavior tests run on it. When the test ends, the client is closed, and the test fails
// if a lease was not unlocked by then. Outside a bubble of testing/synctest such a test takes
// 5 s longer, for which closing the client waits for the Unlock.
//
// As in any program, a goroutine that still waits in Lock when its client is closed panics. That ends
// the test binary before the failure that began it is printed. So have a test end the goroutines that
// it starts. A LockContext that was given t.Context() ends by itself, because that context is canceled
// before the client is closed.
//
// # Trouble
//
// A [Server] can cause the trouble that code with locks should be tested for:
//
//	what happens                                          in a test
//	the lease is lost while the code works                Lose
//	the lease cannot be renewed and ends by itself        Server.FreezeRenewals
//	Redis cannot be reached                               Server.Stop
//	messages are lost, so that waiters have to re-check   Server.DropMessages
//	another process took the lock over meanwhile          Server.Advance
//	another process holds the lock                        another Server.Client
//
// # Virtual time
//
// All of this works inside a bubble of testing/synctest, because the server has no sockets.
// In a bubble a TTL of 30 s passes at once, and synctest.Wait waits until everything that
// can happen has happened. Call [New] or [NewServer] inside the bubble, with the bubble's
// t:
//
//	synctest.Test(t, func(t *testing.T) {
//		server := leasedtest.NewServer(t)
//		client := server.Client()
//		...
//	})
//
// Such tests must not be parallel: go-redis keeps timers for later use, and using a timer
// of another bubble is fatal.
//
// # What it is not
//
// The server is a single node. It has no replicas, so [leased.WithReplicas] refuses every
// lease, and it is not a Cluster. For [leased.NewQuorum], take the Redis clients of several servers, which
// have addresses of their own. A command takes several times as long as on Redis, so measure
// speed on a real server. The server does not work on platforms whose int has 32 bits; there
// [NewServer] skips the test.
package leasedtest
