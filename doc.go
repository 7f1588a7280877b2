// Package leased provides mutual exclusion among the processes of a service: a
// [Mutex] and an [RWMutex] kept in Redis, with the methods of [sync.Mutex] and
// [sync.RWMutex]. The name says what differs from package sync: a lock is held on
// lease, and a lease can be lost.
//
// # Limits
//
// These limits apply to every lease-based lock.
//
// A lease can end while its holder works. [Lease.Context] then ends with cause
// [ErrLeaseLost]. How soon it ends depends on the reason:
//
//   - Redis cannot be reached: on the local clock, before the lease's TTL can
//     have ended on the server. No other process can have been given the lock by
//     then, as long as the rates of the two clocks differ by less than 1 %.
//   - The lock's key was deleted, replaced, flushed or evicted, or a failover
//     lost it: within one renewal period, a third of the TTL, and the time of a
//     command, while Redis answers. In that time two owners can exist.
//   - An operator called [Client.ForceUnlock]: when the message arrives. If the
//     message is lost, within one renewal period. In that time, too, two owners
//     can exist.
//
// A process that is stopped, by its scheduler, a debugger or a suspended machine,
// learns of all this when it runs again, and may issue a write before it notices.
// What closes these gaps is the fencing token, a number that grows with every lease
// of a writer; see Fencing below. Unless the resource checks the token, a lease makes
// duplicate work unlikely, not impossible.
//
// A failover can lose the last writes, since Redis replicates asynchronously. A lost
// grant means two owners until the first of them renews. A lost release means that
// the old owner is recorded again: if another process wants the lock, the old owner's
// process is asked and gives it back; otherwise the TTL ends it. Tokens continue to
// grow through a failover unless the new primary's clock is behind the old one's by
// more than the failover took.
//
// A Redis that evicts keys when its memory is full evicts locks. The volatile-*
// policies do so too, because every key of ours has an expiry. Use noeviction for a
// database that holds locks.
//
// TTLs run on the server's clock. If it is set forward, leases end early; their
// holders learn that from the next renewal, and until then two owners can exist. If it
// is set back, leases are prolonged; any command that sees an owner with more time left
// than its own TTL cuts that down.
//
// Leases are ended by the local clocks, the monotonic one and the wall clock: where
// these move apart, as in a suspended machine, the earlier end counts. So a wall clock
// that is set ahead by more than a TTL ends the leases of its machine.
//
// Tokens follow the server's clock; if it is set back, they continue from the last
// token stored in Redis. Redis learns of tokens assigned by local hand-offs only when
// the process releases the lock. So tokens can repeat or go back, until the clock has
// caught up, if a clock that was ahead is set back and Redis does not know the last
// token: because an owner died, or lost its lease, after local hand-offs, or because
// the keys were flushed or lost as well.
//
// A foreign client that polls for the lock's key with SET NX starves while processes
// of ours are queued: a release hands the lock to the first of them in the same step,
// so the poller never sees it free. It is excluded correctly, and so are we while it
// owns the lock.
//
// With a [redis.Client], a waiter without a live subscription on the server that
// carries out a release (PUBSUB NUMSUB, asked before the waiter is notified) is presumed
// dead and skipped. Where an ACL denies PUBSUB, a dead waiter costs its successor a TTL
// instead. In a Cluster, where no such count proves anything, it costs 2 to 3 s: a waiter
// that is notified of its turn owns for 2 s until it has confirmed that it is there. So a
// lease that another process has just handed on is lost there if Redis does not answer for
// the half second to 2 s that are left of it, whatever its TTL. Behind a proxy that sends
// the subscriptions and the commands of one client to different servers, every waiter looks
// dead. The lock stays exclusive, but waiters then poll, and FIFO order is lost. Behind such
// a proxy, connect to the server itself.
//
// Order is first come, first served among processes in Redis, and among the callers of
// one process. It is not global across all callers: a process that has the lock may
// serve some of its own callers first, within the bounds of [WithLocalHandoffs].
//
// Anything that may write the lock's keys, or publish to the clients' channels, can
// break the lock. What is read from there is validated syntactically, not
// authenticated.
//
// # Fencing
//
// An owner can lose its lease between its read and its write, and not know it yet. So
// the protected resource stores the greatest token it has seen, and every access presents
// the token of its lease ([Lease.Token]), the first one included: the read raises the
// stored token, and is refused if the stored one is not smaller; the write is made only
// if the stored token is still its own. In SQL, with $2 the token:
//
//	UPDATE item SET token = $2 WHERE id = $1 AND token < $2 RETURNING stock
//	UPDATE item SET stock = $3 WHERE id = $1 AND token = $2
//
// No row means that another lease was here; nothing was written. Comparing the token at
// the write only is not enough: two owners that have both read 50 then write 49 one
// after the other, in the order of their tokens; both writes are accepted, and two pieces
// are sold for one. Nor may the first access accept an equal token: while two processes
// own the lock, as after a FLUSHALL, both draw tokens from the same clock, and can draw
// the same one. The examples of Lease.Token have both sequences as Redis scripts.
//
// The token of a reader is greater than that of every earlier writer and smaller than
// that of every later one. Readers of one process that share a grant have one token; the
// tokens of readers in different processes are in no order, because a reader that joins
// readers of its process gets the token of their grant. So only a comparison between a
// reader's and a writer's token means anything: the resource stores the greatest token of
// a writer, compares a reader's with it, and never stores a reader's. After
// [Lease.Downgrade] the lease has a reader's token.
//
// # Use
//
// To Redis, a [Client] is one owner. Make one for a process and keep it. [Client.Mutex]
// returns a handle; all handles of one name in one Client are one lock.
//
// The shortest way to use a lock, and the safest, is [Mutex.Do]:
//
//	err := client.Mutex("invoice:42").Do(ctx, func(ctx context.Context) error {
//		return pay(ctx) // ctx ends with the lease, too
//	})
//
// A [Mutex] has two APIs. Lock, TryLock and Unlock are those of sync.Mutex. They return
// no errors: Lock retries transient errors and errors an operator must fix, and a lost
// lease is reported to the handler of [WithLossHandler]. Do, LockContext and
// TryLockContext take a context and return errors; the latter two return a [Lease] that
// knows whether it is still valid. Code that can stop halfway should use this API, and
// pass Lease.Context to its work. Do not drop the error of [Lease.Unlock]: it may be the
// only sign that another process was inside.
//
// As with sync.Mutex, a lock is not reentrant, is not tied to a goroutine, and must not
// be unlocked when it is not locked: that panics.
//
// Set ContextTimeoutEnabled in the options of a [redis.Client]. Without it no command
// can be bounded by its context, so the locks use a clone with timeouts of its own, which
// go-redis makes without hooks; see [New].
//
// Renewals are pipelines, which from go-redis 9.23 on have up to 10 connections of their
// own (PipelinePoolSize): commands that exhaust the pool do not cost leases. Before that
// they can, so leave room in PoolSize.
//
// # Readers and writers
//
// An [RWMutex] is held by any number of readers or by one writer. A Mutex of the same
// name is the same lock, held for writing.
//
// Readers and writers wait in one queue, first come, first served. A waiting writer keeps
// later readers out, in every process that has learned of it; readers that wait right
// behind a writer enter together. So a stream of readers does not starve a writer, nor do
// writers starve a reader. It also means that a caller must not call RLock twice: if a
// writer came in between, each waits for the other.
//
// The readers of one process share one grant. The first one asks Redis, further ones
// enter without a command, and the last one gives the grant back. Once a request is known
// to wait behind it, it admits no new readers: RLock queues, and TryRLock is refused at
// once. A writer that waits behind readers of its own process is queued in Redis before
// they have unlocked, so readers of other processes do not enter before it either: it
// waits only for those already inside.
//
// In Redis the readers of each process have an expiry of their own. Those of a process
// that died delay a writer by their own TTL at most, however long others read.
//
// [Lease.Downgrade] makes a writer a reader, with no gap in which another could write. A
// reader cannot become a writer: two readers that both upgraded would wait for each other
// for ever. Unlock, lock for writing, and read again what was read.
//
// # States
//
// Two terms: a grant is what Redis gave to this process; a lease is what one caller has
// between Lock and Unlock. One grant serves many leases, one after another, so most of
// what happens inside a busy process needs no message to Redis.
//
//	none ──► asking ──► queued ──► held ──► releasing ──► none
//	            │                  ▲  │          │
//	            └── it was free ───┘  │          └── yield ──► queued, or held
//	                                  └── lost ──► none
//
//	asking     a command is on its way
//	queued     others have the lock; a message or a re-check ends the wait
//	held       callers enter, or the grant idles (WithIdleHold)
//	releasing  no caller is inside, and others want the lock or no caller here does;
//	           yield is a release that queues again, for callers that wait here
//
// A downgrade happens within held: the grant gets another id, and until the reply comes
// either id may be the owner.
//
// While a grant is held, its callers enter in the order they came. When another process
// is known to want the lock, the number of leases that are still admitted locally, and
// the time for which they are, are bounded before the lock is handed over; see
// [WithLocalHandoffs]. Even if the message that said so was lost, a lock in continuous use
// is offered to others about once a second.
//
// A lease ends with Unlock, with the loss of its grant, with its maximum hold
// ([WithMaxHold]), or, for its contexts, with [Client.Close]. A caller whose lease ended
// early is still inside as far as its own process is concerned: the next local caller
// waits for its Unlock, as with sync.Mutex.
//
// # Trust
//
// A grant is believed from the instant before the command that proved it was sent, for
//
//	TTL − TTL/100 − 2 ms
//
// The time that the command and its reply take counts against us; the margin covers
// clocks that run at different speeds. A message that says "granted" is trusted from the
// sending of the request that it answers, never from its arrival. [Lease.TrustedUntil]
// returns the end of the window. In a Cluster a lease that came with such a message is
// believed for 2 s less the margin at most, until its first renewal, which is sent at once.
//
// Leases are renewed after a third of the TTL, those of a client together, and at once by
// [Lease.Check]. A renewal has three outcomes. "Renewed" moves the window. "Not ours" ends
// the lease at once. No reply is not a loss: the renewal is repeated until the window ends,
// and only then is the lease lost. A late "renewed" does not revive it.
//
// The window is checked before every entry, also before those that need no Redis. The
// time that a machine sleeps counts: the time passed is that of the wall clock or of the
// monotonic clock, whichever is more. A lease whose window ended during a sleep ends
// within a second of waking, and a wall clock that is set ahead by more than a TTL looks
// like a sleep. Where the clocks have moved apart by less, the grant is renewed at once,
// and confirmed before a caller enters on it.
//
// # Waiting
//
// A process that finds the lock taken leaves one request in a queue in Redis, however
// many of its callers wait. The script that releases the lock makes the first live request
// the owner in the same step and publishes one message, to the client that the request
// came from. No other process is woken, and none has to win a race. A waiter that does not
// listen is skipped before it is recorded as the owner; a grant that was published is
// never taken back.
//
// Messages can be lost, so waiters also re-check: when the subscription was renewed, when
// the owner's TTL ends, and after a third of their own TTL or 3 s, whichever is less,
// shortened at random by up to a third; in a Cluster the first in the queue after 1 s. In a
// queue of hundreds those far behind wait longer, up to half of their TTL or 15 s. Re-checks
// keep the place in the queue; a request without them is dropped by those behind it. They
// also have the server send an echo, and if none comes within 1 s the subscription is
// rebuilt.
//
// A client receives messages soon after it has asked for its first lock. Until then it
// does not queue in Redis, where a process that dies could not be proved dead: a free lock
// is taken at once, and a caller that has to wait asks again once messages are received.
//
// If the server, or a proxy before it, refuses to subscribe or to publish, for whatever
// reason, waiters poll, from every 50 ms to every 3 s or third of the TTL. While the owner
// is a foreign client, the first waiter in the queue polls; each new foreign owner is
// polled from every 50 ms again.
//
// A Try that finds the lock with an owner that may be keeping it idle (see
// [WithIdleHold]) asks for it, and waits at most 50 ms, and as long again if the client
// has only just begun.
//
// When the context of LockContext ends, the caller returns at once, and the request stays
// with the callers that still wait in the process. If there are none, it is removed from
// Redis. If the lock arrives at the same instant, it goes to the next local caller, or
// back.
//
// # Failures
//
// Every command carries the id of its request and may run twice. A command without a
// reply is repeated under the same id. A release without a reply is followed by cancelling
// its id until no late command can bring it back, while the lock continues under a fresh
// one. What another id owns is never released, extended or renewed.
//
// Transient errors, such as a lost connection, a failover or a loading server, are retried
// with the pauses of [WithBackOff]. Meanwhile one lock of a client asks every 2 s, and
// when it gets a reply all others continue at once. Errors that an operator must fix
// (NOAUTH, NOPERM, WRONGTYPE, protected mode) are returned by LockContext at once, and
// retried by Lock. For a key of another type, such as the hashes that Redisson uses, the
// error says so in words. Bad names, bad options, a closed client and a closed
// *redis.Client are errors of LockContext and panics of Lock.
//
// Unlock returns nil only if another caller of this process continues with the lock, if the
// process keeps it idle ([WithIdleHold]), if Redis confirmed the release, or if the lock's last
// token proves that it was ours until then; otherwise it returns [ErrLeaseLost], which then
// says that the lock could no longer be proved ours. It waits for Redis at most as long as [WithReleaseTimeout] says. After
// that it returns [ErrNotReleased], and the client keeps retrying in the background until
// Redis has answered or the TTL has passed. When a process dies, its locks are free after
// their TTL and its places in the queue are skipped.
//
// [Client.Shutdown] returns when its context ends, at the latest. Its error says what it
// could not wait for, and a later Close or Shutdown returns the same one.
//
// Errors are compared with [errors.Is]. The error of a caller that was not admitted
// matches [ErrNotAcquired], the context's error if it ended, and the last error of Redis.
// The error of a lease that was lost says which, and why; at the end of a maximum hold it
// matches [ErrMaxHold] too.
//
// At most one line a minute is logged for each cause, but lost leases are always logged:
// those that are lost together for one reason in one line. Lines about a lock name it,
// unless [WithoutLockNamesInLogs] keeps names out.
//
// User code never runs under a mutex of this package, nor on the goroutines that renew
// leases, end them, or receive messages. The logger, the loss handler, and the
// OpenTelemetry calls that report losses and ends run on goroutines that no lock waits
// for: if they block, later calls wait, and finally are dropped; if they panic, that is
// logged through [slog.Default]. The spans and measurements of a caller and the back-off
// policy may be called on the caller's goroutine. Hooks of the Redis client run as part of
// its commands: a hook that blocks is like a Redis that does not answer. A hook must not repeat a
// command: the answer, or the error, of its last try would be taken for that of all, so that an
// Unlock that Redis carried out at the first one is reported as a loss, or a wait that was given
// up leaves the lock to its TTL.
//
// # Memory model
//
// In the terminology of the Go memory model, the n'th call of Unlock synchronizes before
// the m'th return of Lock on the same lock of the same Client, for any n < m. For any call
// of RLock there is an n such that the n'th Unlock synchronizes before the return of RLock,
// and the matching RUnlock before the return of the n+1'th Lock. A call of TryLock or
// TryRLock that returns true is equivalent to one of Lock or RLock; one that returns false
// establishes no relation.
//
// There is no such relation between processes, which share no memory, nor between two
// Clients of one process, although they exclude each other.
package leased
