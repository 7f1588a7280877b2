// Package leased provides mutual exclusion between the processes of a service. Its [Mutex]
// and [RWMutex] are kept in Redis and have the methods of [sync.Mutex] and [sync.RWMutex].
// Unlike a lock of package sync, a lock here is held on a lease, and a lease can be lost:
// hence the name.
//
// # Limits
//
// As with every lease-based lock, a lease can end while its holder is still working. [Lease.Context] is
// then canceled with cause [ErrLeaseLost]. How soon that happens depends on why the lease ended:
//
//   - Redis cannot be reached: by the local clock, before the lease's TTL can have expired
//     on the server. By then no other process can have been given the lock, as long as the
//     rates of the two clocks differ by less than 1 % and, after a failover, the new
//     primary's clock is not ahead of the old one's by more than 1 % of the TTL.
//   - The lock's key was deleted, replaced, flushed, evicted, or lost in a failover: within
//     one renewal period, which is a third of the TTL, plus the time of a command, while
//     Redis answers. During that time there can be two owners.
//   - An operator called [Client.ForceUnlock]: when the message arrives or, if the message
//     is lost, within one renewal period. During that time, too, there can be two owners.
//
// A process that was stopped, by its scheduler, by a debugger, or because its machine was
// suspended, learns of all this only when it runs again, and may go on writing until it
// notices. The fencing token closes these gaps: it is a number that grows with every
// writer's lease; see Fencing below. Unless the resource checks the token, a lease makes
// duplicate work unlikely, not impossible.
//
// Redis replicates asynchronously, so a failover can lose the most recent writes. If it
// loses a grant, there can be two owners until the first of them renews at the new primary.
// (An old primary that is cut off together with a holder goes on renewing the holder's lease,
// unless min-replicas-to-write or [WithReplicas] ends that.) If it loses a release, Redis
// records the old owner again: if a caller waits for the lock, the old owner's process is
// asked for it and gives it back; otherwise the TTL ends the record. Tokens continue to grow
// through a failover unless the new primary's clock is behind the old one's by more than the
// failover took.
//
// A Redis server that evicts keys when its memory is full also evicts locks. This includes
// the volatile-* policies, because every key of a lock has an expiry. Use noeviction for a
// database that holds locks.
//
// TTLs run on the server's clock. If that clock is set forward, leases end early; their
// holders learn of it at the next renewal, and until then there can be two owners. If it is
// set back, leases last longer; a command that finds an owner with more time left than
// its own TTL, or an owner's key without an expiry, cuts the time left to that TTL.
//
// A process ends its leases by two local clocks, the monotonic clock and the wall clock.
// When the two diverge, as they do on a suspended machine, the earlier end counts. So a
// wall clock that is set ahead by d can end every lease of its machine that was last renewed
// more than TTL − d ago.
//
// Tokens follow the server's clock. If that clock is set back, tokens continue from the
// last one stored in Redis. Redis learns of the tokens assigned in local hand-offs only
// when the process releases the lock. So if a clock that was ahead is set back while Redis
// does not know the last token, tokens can repeat or go backwards until the clock has
// caught up. Redis does not know the last token if an owner died or lost its lease after
// local hand-offs, or if the keys were flushed or lost. It also forgets the last token on a
// server whose clock is more than ten minutes behind it, if the lock is not used there for
// ten minutes after MIGRATE has moved its slot there or, on Redis 6.2, after a failover to
// that server: these pass on the key's expiry as a duration.
//
// While a process has not noticed that its lock was lost, as after a FLUSHALL, callers that it
// admits without asking Redis, such as a reader that joins others, can get a token below that of
// an owner in between. A resource that has stored that owner's token refuses them, as it should.
//
// A foreign client, one that does not use this package, starves if it polls for the lock's
// key with SET NX while processes that use this package are queued: a release hands the
// lock to the first of them in the same atomic step, so the poller never sees the lock
// free. Mutual exclusion holds in both directions: the foreign client is kept out while we
// own the lock, and we are kept out while it does.
//
// With a [redis.Client], a waiter that has no live subscription on the server that carries
// out a release is presumed dead and skipped. The release checks that with PUBSUB NUMSUB
// before it notifies the waiter. Where an ACL denies PUBSUB, a dead waiter delays its
// successor by a TTL instead. In a Cluster, where such a count proves nothing, a dead
// waiter delays its successor by 2 to 3 s: a waiter that is notified of its turn owns the
// lock for only 2 s until it confirms that it is there. So in a Cluster a lease that
// another process has just handed over is lost, whatever its TTL, if Redis does not answer
// within the half second to 2 s that are left of it. Behind a proxy that sends one client's
// subscriptions and commands to different servers, every waiter looks dead: the lock stays
// exclusive, but waiters poll, FIFO order is lost, and while another process uses the lock
// without a pause, a waiter may not get it at all. If there is such a proxy, connect to
// the server directly.
//
// The lock is granted first come, first served among the processes queued in Redis, and
// among the callers of one process. There is no such order across all callers: a process
// that has the lock may serve some of its own callers first, within the bounds of
// [WithLocalHandoffs].
//
// Anyone who may write the lock's keys can break the lock. So can anyone who may publish to
// the clients' channels and also learn the ids of requests, by reading those keys or by
// subscribing to those channels. The package validates the syntax of what it reads from
// there, but does not authenticate it.
//
// # Fencing
//
// An owner can lose its lease between its read and its write without knowing it yet. So the
// protected resource stores the greatest token it has seen, and every access, including the
// first, presents the token of its lease ([Lease.Token]). The read raises the stored token,
// and is refused unless the stored token is smaller. The write is made only if the stored
// token is still the writer's own. In SQL, with the token as $2:
//
//	UPDATE item SET token = $2 WHERE id = $1 AND token < $2 RETURNING stock
//	UPDATE item SET stock = $3 WHERE id = $1 AND token = $2
//
// If a statement matches no row, another lease was here, this one has presented its token
// before, or there is no such row; in each case nothing was written. Comparing the token
// only at the write is not enough: two owners that have both read 50 then both
// write 49, in the order of their tokens; both writes are accepted, and two items are sold
// while the stock goes down by one. The first access must not accept an equal token either:
// while two processes own the lock, as can happen after a FLUSHALL, both draw tokens from
// the same clock, and can draw the same token. The examples of Lease.Token show both the
// right and the wrong sequence as Redis scripts.
//
// A reader's token is greater than the token of every earlier writer and smaller than the
// token of every later writer. Readers of one process that share a grant have the same
// token. The tokens of readers in different processes are in no particular order, because a
// reader that joins other readers of its process gets the token of their grant. So only a
// comparison between a reader's token and a writer's token is meaningful: the resource
// stores the greatest token of any writer, compares a reader's token with it, and never
// stores a reader's token. After [Lease.Downgrade] a lease has a reader's token.
//
// # Use
//
// Redis sees a [Client] as one owner. Create one Client per process and keep it.
// [Client.Mutex] returns a handle; all handles of a name in one Client are the same lock.
//
// The shortest and safest way to use a lock is [Mutex.Do]:
//
//	err := client.Mutex("invoice:42").Do(ctx, func(ctx context.Context) error {
//		return pay(ctx) // ctx also ends with the lease
//	})
//
// A [Mutex] has two APIs. The first consists of Lock, TryLock and Unlock, as in sync.Mutex.
// They return no errors: Lock retries transient errors as well as errors that an operator
// must fix, and a lost lease is reported to the handler set by [WithLossHandler]. The
// second consists of Do, LockContext and TryLockContext, which take a context and return
// errors. LockContext and TryLockContext return a [Lease], which knows whether it is still
// valid. Code that can stop halfway should use this second API, and pass its work the context
// of Do or of [Lease.With]. Do not drop the error of [Lease.Unlock]: it may be the only sign that another
// process was in the critical section.
//
// As with sync.Mutex, a lock is not reentrant and is not tied to a goroutine. Unlocking a
// lock that is not locked panics; unlike the fatal error of package sync, this panic can be
// recovered.
//
// Set ContextTimeoutEnabled in the options of a [redis.Client]. Without it, a context
// cannot bound a command, so the locks use a clone of the client with timeouts of its own,
// and go-redis makes the clone without hooks; see [New].
//
// Renewals are sent as pipelines. From go-redis 9.23 on, pipelines have up to 10
// connections of their own (PipelinePoolSize), so commands that exhaust the connection pool
// do not cost leases. Before that version they can, so leave room in PoolSize.
//
// # Readers and writers
//
// An [RWMutex] is held by any number of readers or by one writer. A Mutex of the same name
// is the same lock, held for writing.
//
// Readers and writers wait in one queue, first come, first served. A waiting writer keeps
// out later readers, in every process that has learned of the writer. Readers that wait
// directly behind a writer enter together. So a stream of readers does not starve a writer,
// and writers do not starve a reader. It also follows that a caller that holds RLock must
// not call RLock again: if a writer came in between, each would wait for the other.
//
// The readers of one process share one grant. The first reader asks Redis for it, further
// readers enter without a command, and the last reader gives it back. Once a request is
// known to wait behind the grant, it admits no new readers: RLock queues, and TryRLock is
// refused at once. A writer that waits behind readers of its own process joins the queue in
// Redis before they have unlocked, so readers of other processes do not enter before it
// either: it waits only for readers that are already inside.
//
// In Redis, the readers of each process have their own expiry. The readers of a process
// that died delay a writer by their own TTL at most, however long other readers stay.
//
// [Lease.Downgrade] turns a writer into a reader, with no gap in which another writer could
// enter. A reader cannot become a writer: two readers that both upgraded would wait for
// each other forever. Instead, unlock, lock for writing, and read again.
//
// # States
//
// A grant is what Redis gave to this process; a lease is what one caller holds between Lock
// and Unlock. One grant serves many leases, one after another, so in a busy process most
// calls of Lock and Unlock need no command to Redis.
//
//	none ──► asking ──► queued ──► held ──► releasing ──► none
//	            │                  ▲  │          │
//	            └── it was free ───┘  │          └── yield ──► queued, or held
//	                                  └── lost ──► none
//
//	asking     a command is on its way
//	queued     others have the lock; a message or a re-check ends the wait
//	held       callers enter, or the grant idles (WithIdleHold)
//	releasing  no caller is inside, and either others want the lock or no caller here does;
//	           a yield is a release that queues again, for the callers waiting here
//
// A downgrade happens in the state held: the grant gets a new id, and until the reply
// arrives either id may be the owner.
//
// While a grant is held, local callers enter in the order in which they came. Once another
// process is known to want the lock, only a bounded number of leases are admitted locally,
// and only for a bounded time, before the lock is handed over; see [WithLocalHandoffs].
// Even if the message from that process was lost, a writer's lock in continuous use is offered to
// others about once a second, or after the time set by WithLocalHandoffs if that is longer. Readers, and a
// lock that is kept idle between its uses, wait for the message to be repeated: 3 s for the first waiter, and
// minutes if their process receives none.
//
// A lease ends with Unlock, with the loss of its grant, or at its maximum hold
// ([WithMaxHold]); its contexts also end with [Client.Close]. Within its own process, a
// caller whose lease ended early still holds the lock: the next local caller waits for its
// Unlock, as with sync.Mutex.
//
// # Trust
//
// A process trusts a grant from the instant before it sent the command that proved the
// grant, for
//
//	TTL − TTL/100 − 2 ms
//
// So the time that the command and its reply took counts against the holder. The margin
// covers clocks that run at different rates. A message that says "granted" is trusted from
// the sending of the request that it answers, never from its arrival. [Lease.TrustedUntil]
// returns the end of this window. In a Cluster, a lease that came with such a message is
// trusted for at most 2 s less the margin, until its first renewal, which is sent at once.
//
// A lease is renewed after a third of its TTL, together with the client's other leases, and at once by
// [Lease.Check]. A client that holds more than 50 locks spreads their renewals over a thirtieth of the
// TTL, so when others of its locks come and go, one may come that much later. A renewal has three
// outcomes. "Renewed" moves the window. "Not this client's" ends the lease at once. A missing reply is
// not a loss: the client repeats the renewal until the window ends, and only then is the lease lost. A
// late "renewed" does not revive it.
//
// The window is checked before every caller enters, even if entering needs no command. Time
// during which the machine sleeps counts: the elapsed time is that of the wall clock or of
// the monotonic clock, whichever is greater. A lease whose window ended during a sleep ends
// within a second of waking, and a wall clock that is set ahead looks like a sleep. (A virtual
// machine that its host stops may not see any time go by; then the next renewal finds the loss.) If the
// clocks have diverged by less than what is left of the window, the grant is renewed at
// once, and the renewal is confirmed before a caller enters.
//
// # Waiting
//
// A process that finds the lock taken leaves one request in a queue in Redis, however many
// of its callers wait. The script that releases the lock also makes the first live request
// the owner, and publishes one message, to the client that made the request. No other
// process is woken, and none has to win a race. A waiter that is not subscribed is skipped
// before it is recorded as the owner; a grant that was published is never taken back.
//
// Messages can be lost, so waiters also re-check the lock: when the subscription was
// renewed, when the owner's TTL ends, and after a third of their own TTL or 3 s, whichever
// is less, shortened at random by up to a third. In a Cluster, the first waiter in the
// queue re-checks after 1 s at most. In a queue of hundreds, waiters far behind wait longer
// between re-checks: up to 20 s, but never longer than the greater of half their TTL and
// their TTL minus 10 s. If a lock loses its owner without a message, for example because its
// key was deleted by hand, a re-check of the first waiter notices; if that waiter has died as
// well, the lock can stand free for up to 15 s. A re-check keeps the request's place in the
// queue; requests behind it drop a request that stops re-checking. If no message has
// arrived for a while, a re-check also has the server send an echo, and if the echo does
// not arrive within 1 s, the client rebuilds its subscription.
//
// A client receives messages soon after it has asked for its first lock. Until then it does
// not queue in Redis, because nothing could prove it dead if its process died. It takes a
// free lock at once; a caller that has to wait asks again once the client receives
// messages. If the first attempt to subscribe fails, or while a subscription that broke is made anew,
// the client queues without such a proof, for as long as that request waits: if its process then
// dies, the request stays in the queue for up to its TTL, or is made the owner for a TTL if its turn
// comes before that.
//
// If the server, or a proxy in front of it, refuses SUBSCRIBE or PUBLISH for whatever
// reason, or if attempts to subscribe have failed for 4 s, as at a server that has reached
// its maxclients, or no subscription has lasted, waiters poll, first after 50 ms, then at
// longer and longer intervals, up to 3 s or a third of the TTL, whichever is less. Such a
// process delays the others, too: when the lock is handed to it, it finds out by polling.
// While a foreign client owns the lock, the first waiter in the queue polls; for each new
// foreign owner, polling starts at 50 ms again, if its value is another one.
//
// If TryLock or TryLockContext finds an owner that may be keeping the lock idle (see
// [WithIdleHold]), it asks for the lock and waits at most 50 ms and four round trips, and up to 50 ms more
// if the client has only just started.
//
// When the context given to LockContext ends, LockContext returns at once, and its request
// remains for the callers of the process that still wait. If there are none, the request is
// removed from Redis. If the lock arrives at the same moment, it goes to the next local
// caller or is given back.
//
// # Failures
//
// Every command carries the id of its request and may run twice. A command that gets no
// reply is repeated under the same id. After a release that got no reply, the client
// cancels the id of the release until no late command can bring that id back; meanwhile the
// lock continues under a new id. A command never releases, extends or renews what another
// id owns.
//
// Transient errors, such as a lost connection, a failover or a server that is loading its
// data, are retried after the pauses set by [WithBackOff]. Meanwhile one of the client's
// locks asks Redis every 2 s, or every 4 s if only one lock waits and gets no answer at all; when
// it gets a reply, all other locks continue at once.
// LockContext returns errors that an operator must fix (NOAUTH, NOPERM, WRONGTYPE,
// protected mode) at once; Lock retries them. If the key has another type, such as the
// hashes that Redisson uses, the error says so in words. On a bad name, a bad option, a
// closed client or a closed *redis.Client, LockContext returns an error and Lock panics. Closing the
// *redis.Client alone is not noticed by calls that wait for another caller of this process, which go on
// waiting for its Unlock, nor by [Lease.Downgrade], which waits until its context ends or the lease is lost.
//
// Unlock returns nil only if another caller of this process continues with the lock, if other readers of
// this process still hold it, if the process keeps it idle ([WithIdleHold]), if Redis confirmed the
// release, or if the lock's last token proves that the lock was this client's until then. If none of these
// holds, it returns [ErrLeaseLost]: the lock was lost, or could no longer be proved to have been this
// client's. On a quorum, Redis may confirm a release although another client had the lock in between, if an
// operator took the lock away or a server's clock was set. Unlock waits for Redis for at most the time set
// by [WithReleaseTimeout]. After that it returns [ErrNotReleased], and the client keeps retrying in the
// background until Redis has answered or the TTL has passed.
//
// When a process dies, its locks are free after their TTL. Once its connection is closed, a
// release skips its waiting requests without delay; for a Cluster, see Limits above. But
// readers that queue behind a killed writer, while other readers hold the lock, wait until
// the writer's TTL is over, and up to 4 s more.
//
// [Client.Shutdown] returns at most 200 ms after its context has ended, and on a quorum at
// most 300 ms. Its error says what it could not wait for, and a later Close or Shutdown
// returns the same error.
//
// Compare errors with [errors.Is]. If a caller was not admitted, its error matches
// [ErrNotAcquired], the context's error if the context ended, and the last error of Redis.
// The error of a lost lease identifies the lease and says why it was lost; at the end of a
// maximum hold it also matches [ErrMaxHold].
//
// Each cause is logged at most once a minute, or once for each outage if outages follow more
// quickly. Lost leases are always logged, unless there is a handler of [WithLossHandler],
// which is then told instead; leases that are lost together for one reason share a line.
// Debug lines are not limited: there is one for each command that fails and is not repeated at once, and one
// for each of many leases that are lost together. They are dropped only when a slow logger has 1,024 calls, or
// 100,000 losses, waiting. A line about a lock names the lock, unless [WithoutLockNamesInLogs] keeps names
// out.
//
// User code never runs under a mutex of this package, nor on the goroutine that ends leases when their time
// is up and has the others renewed. The goroutine that receives messages runs no user code but the dialer
// and the dial hooks of the Redis client, when it connects: while one of them blocks there, no messages
// arrive, and waiters depend on their re-checks. The logger, the loss handler, and the OpenTelemetry calls
// that report losses and ends run on goroutines that no lock waits for. If such a call blocks, later calls
// wait and are eventually dropped; if it panics, the panic is logged through [slog.Default]. The spans and
// measurements of a caller, and the back-off policy, may be called on the caller's goroutine. Hooks of the
// Redis client run as part of its commands, renewals included: the locks treat a hook that blocks like a
// Redis that does not answer. There is one exception. On a single server whose commands can be given
// deadlines (see [New]), calls that could not stop waiting anyway send their command themselves: Lock and
// RLock, the calls that lock or unlock with a context that cannot end, and Unlock unless
// [WithReleaseTimeout] is shorter than 1 s, or than the eight round trips that a command may take that makes
// a connection. They wait for a hook that goes on after its context has ended.
// A hook must not retry a command: Leased would see only the last reply, and assume that the command had
// been sent once. Then an Unlock that Redis carried out at the first try is reported as a loss, or a wait
// that was given up leaves the lock to its TTL.
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
// A call of LockContext, TryLockContext or Do that gets the lock is equivalent to one of Lock, or of RLock
// if it is for reading, and any call that ends a hold to one of Unlock or RUnlock. A [Lease.Downgrade] that
// turns a writer's lease into a reader's is equivalent to an Unlock followed at once by an RLock, with no
// other Lock in between.
//
// There is no such relation between processes, which share no memory, nor between two
// Clients of one process, although they exclude each other.
package leased
