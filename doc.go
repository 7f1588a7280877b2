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
// [ErrLeaseLost]. How soon that is depends on why:
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
// A process that is stopped, by its scheduler, a debugger or a suspended
// machine, learns of all this when it runs again, and may issue a write before it
// notices. What closes these gaps is the fencing token, a number that grows with
// every lease of a writer; see Fencing below. Without that check, at the resource, a
// lease makes duplicate work unlikely, not impossible.
//
// A failover can lose the last writes, since Redis replicates asynchronously. A
// lost grant means two owners until the first of them renews. A lost release
// means that the old owner is recorded again: if another process wants the lock,
// the old owner's process is asked and gives it back, else the TTL ends it.
// Tokens continue to grow through a failover unless the new primary's clock is
// behind the old one's by more than the failover took.
//
// A Redis that evicts keys when its memory is full evicts locks, the volatile-*
// policies included, for every key of ours has an expiry. Use noeviction for a
// database that holds locks.
//
// TTLs run on the server's clock. Set forward, it ends leases early; their holders
// learn that from the next renewal, and until then two owners can exist. Set back,
// it prolongs them; any command that sees an owner with more time left than its own
// TTL cuts that down.
//
// Leases are ended by the local clocks, the monotonic one and the wall clock: where
// these move apart, as in a suspended machine, the earlier end counts. So a wall clock
// that is set ahead by more than a TTL ends the leases of its machine.
//
// Tokens follow the server's clock; if it is set back, they continue from the last
// token stored in Redis. Redis learns of tokens assigned by local hand-offs only when
// the process releases the lock. So tokens can repeat or go back, until the clock has
// caught up, where a clock that was ahead goes back and Redis does not know the last
// of them: because an owner died, or lost its lease, after local hand-offs, or because
// the keys were flushed or lost as well.
//
// A foreign client that polls for the lock's key with SET NX starves while
// processes of ours are queued: a release hands the lock to the first of them in
// the same step, so the poller never sees it free. It is excluded correctly, and
// so are we while it owns the lock.
//
// With a [redis.Client], a waiter without a live subscription on the server that
// carries out a release (PUBSUB NUMSUB, asked before the waiter is told anything) is
// presumed dead and skipped. Where an ACL denies PUBSUB, a dead waiter costs its
// successor a TTL instead. Behind a proxy that sends the
// subscriptions and the commands of one client to different servers, every waiter looks
// like that. The lock stays exclusive, but waiters then poll, and FIFO order is lost.
// Behind such a proxy, connect to the server itself.
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
// the protected resource keeps the greatest token it has seen, and every access presents
// the token of its lease ([Lease.Token]), the first one included: the read raises the
// stored token, and is refused if the stored one is not smaller; the write is made only
// if the stored token is still its own. In SQL, with $2 the token:
//
//	UPDATE item SET token = $2 WHERE id = $1 AND token < $2 RETURNING stock
//	UPDATE item SET stock = $3 WHERE id = $1 AND token = $2
//
// No row means that another lease was here; nothing was written. To compare the token at
// the write only is not enough: two owners that have both read 50 then write 49 one
// after the other, in the order of their tokens, both are accepted, and two pieces are
// sold for one. Nor may the first access accept an equal token: while two processes own
// the lock, as after a FLUSHALL, both draw tokens from the same clock, and can draw the
// same one. The examples of Lease.Token have both sequences as Redis scripts.
//
// The token of a reader is greater than that of every earlier writer and smaller than
// that of every later one. Readers of one process that share a grant have it in common;
// the tokens of readers in different processes are in no order, for a reader that joins
// readers of its process gets the token of their grant. So only a comparison between a
// reader's and a writer's token means anything: the resource keeps the greatest token of a
// writer, compares a reader's with it, and never stores a reader's. After
// [Lease.Downgrade] the lease has a reader's token.
//
// # Use
//
// A [Client] is one owner in the eyes of Redis. Make one for a process and keep
// it. [Client.Mutex] returns a handle; all handles of one name in one Client are
// one lock.
//
// The shortest way to use a lock, and the safest, is [Mutex.Do]:
//
//	err := client.Mutex("invoice:42").Do(ctx, func(ctx context.Context) error {
//		return pay(ctx) // ctx ends with the lease, too
//	})
//
// A [Mutex] has two APIs. Lock, TryLock and Unlock are those of sync.Mutex. They
// return no errors: Lock retries transient errors and errors an operator must fix,
// and a lost lease is reported to the handler of [WithLossHandler]. Do, LockContext and
// TryLockContext take a context and return errors; the latter two return a [Lease]
// that knows whether it is still good. Code that can stop halfway should use this
// API, and pass Lease.Context to its work. Do not drop the error of [Lease.Unlock]: it may
// be the only sign that another process was inside.
//
// As with sync.Mutex, a lock is not reentrant, is not tied to a goroutine, and
// must not be unlocked when it is not locked: that panics.
//
// Set ContextTimeoutEnabled in the options of a [redis.Client]. Without it no
// command can be bounded by its context, so the locks use a clone with time-outs
// of its own, which go-redis makes without hooks; see [New].
//
// Renewals are pipelines, which from go-redis 9.23 on have up to 10 connections of
// their own (PipelinePoolSize): commands that exhaust the pool do not cost leases.
// Before that they can, so leave room in PoolSize.
//
// # Readers and writers
//
// An [RWMutex] is held by any number of readers or by one writer. It is the same
// lock as the Mutex of its name, which is its writers' half.
//
// Readers and writers wait in one queue, first come, first served. A waiting writer
// keeps later readers out, in every process that has heard of it; readers that wait
// right behind a writer enter together. So a stream of readers does not starve a
// writer, nor do writers starve a reader. It also means that a caller must not call
// RLock twice: if a writer came in between, each waits for the other.
//
// The readers of one process share one grant. The first one asks Redis, further
// ones enter without a command, and the last one gives the grant back. Once a
// request is known to wait behind it, it admits no new readers: RLock queues, and
// TryRLock is refused at once. A writer that waits behind readers of its own
// process has its place in the queue before they have left, so readers of other
// processes do not enter before it either: it waits only for those already inside.
//
// In Redis the readers of each process have an expiry of their own. Those of a
// process that died delay a writer by their own TTL at most, however long others
// read.
//
// [Lease.Downgrade] makes a writer a reader, with no gap in which another could
// write. A reader cannot become a writer: two that both wanted it would wait for
// each other for ever. Let go, lock for writing, and look again at what was read.
//
// # States
//
// Two terms: a grant is what Redis gave to this process; a lease is what one caller
// has between Lock and Unlock. One grant serves many leases,
// one after another, so most of what happens inside a busy process needs no
// message to Redis.
//
//	none ──► asking ──► queued ──► held ──► letting go ──► none
//	            │                  ▲  │           │
//	            └── it was free ───┘  │           └── yield ──► queued, or held
//	                                  └── lost ──► none
//
//	asking      a command is on its way
//	queued      others have the lock; a message or a re-check ends the wait
//	held        callers enter, or the grant idles (WithIdleHold)
//	letting go  no caller is inside, and others want the lock or no caller here does;
//	            yield is a release that queues again, for callers who wait here
//
// A downgrade happens within held: the grant gets another id, and until the
// answer comes either id may be the one that owns.
//
// While a grant is held, its callers enter in the order they came. When another
// process is known to want the lock, the number of leases and the time that are
// given out locally are bounded before the lock goes there; see WithLocalHandoffs. Even
// if that message was lost, a lock in continuous use is offered to others about once
// a second.
//
// A lease ends with Unlock, with the loss of its grant, with its maximum hold
// ([WithMaxHold]), or, for its contexts, with [Client.Close]. A caller whose
// lease ended early is still inside as far as its own process is concerned: the
// next local caller waits for its Unlock, as with sync.Mutex.
//
// # Trust
//
// A grant is believed from the instant before the command that proved it was
// sent, for
//
//	TTL − TTL/100 − 2 ms
//
// The command's way to the server counts against us, and so does the way back;
// the margin covers clocks that run at different speeds. A message that says
// "granted" is trusted from the sending of the question it answers, never from
// its arrival. [Lease.TrustedUntil] returns the end of the window.
//
// Leases are renewed after a third of the TTL, those of a client together. A renewal
// has three outcomes. "Renewed" moves the window. "Not ours" ends the lease at once.
// No answer is not a loss: the renewal is repeated until the window ends, and only then
// is the lease lost. A late "renewed" revives nothing.
//
// The window is checked before every entry, also before those that need no
// Redis. The time that a machine sleeps counts: what has passed is what the wall
// clock or the monotonic clock says, whichever is more. A lease whose window ended in a
// sleep ends within a second of waking, and a wall clock that is set ahead by more than
// a TTL looks like a sleep. Where the clocks have moved apart by less, the grant is
// renewed at once, and confirmed before a caller enters on it.
//
// # Waiting
//
// A process that finds the lock taken leaves one request in a queue in Redis,
// however many of its callers wait. The script that releases the lock makes the
// first live request the owner in the same step and publishes one message, to the
// client it came from. No other process wakes, and none has to win a race. A waiter that
// does not listen is skipped before it is recorded; what was published is never taken
// back.
//
// Messages can be lost, so waiters also re-check: when the subscription was renewed,
// when the owner's TTL ends, and after a third of their own TTL or 3 s, whichever is
// less, shortened at random by up to a third. Re-checks keep the place in the queue; a
// request without them is dropped by those behind it. They also have the server send an
// echo, and if none comes within 1 s the subscription is rebuilt.
//
// A client hears messages soon after it has asked for its first lock. Until then it
// does not queue in Redis, where a process that dies could not be proved dead: a free
// lock is taken at once, and a caller that has to wait asks again when messages are
// heard.
//
// If the server, or a proxy before it, refuses to subscribe or to publish, for whatever
// reason, waiters poll, from every 50 ms to every 3 s or third of the TTL. While the owner
// is a foreign client, the first in the queue polls, anew for each such owner.
//
// A Try that finds the lock with an owner that may be keeping it idle (see
// [WithIdleHold]) asks for it, and waits at most 50 ms, and as long again if the client
// has only just begun.
//
// When the context of LockContext ends, the caller returns at once, and the request
// stays with the callers that still wait in the process. If there are none, it is
// removed from Redis. If the lock arrives at the same instant, it goes to the next local
// caller, or back.
//
// # Failures
//
// Every command carries the id of its request and may run twice. A command
// without an answer is repeated under the same id. A release without an answer
// is followed by cancelling its id until no late command can bring it back, while
// the lock continues under a fresh one. What another id owns is never
// released, extended or renewed.
//
// Transient errors, such as a lost connection, a failover or a loading server, are
// retried with the pauses of [WithBackOff]. Meanwhile one lock of a client asks every 2 s,
// and when it is answered all others continue at once. Errors that an operator must fix
// (NOAUTH, NOPERM, WRONGTYPE, protected mode) are returned by LockContext at once, and
// retried by Lock. A key of another type, such as the hashes that Redisson uses, is
// reported in words. Bad names, bad options, a closed client and a closed *redis.Client
// are errors of LockContext and panics of Lock.
//
// Unlock returns nil only if another caller of this process goes on with the lock, if
// Redis confirmed the release, or if the lock's last token proves that it was ours until
// then; otherwise it returns [ErrLeaseLost], which then says that the lock could no
// longer be proved ours. It waits for Redis at most as long as
// [WithReleaseTimeout] says. After that it returns [ErrNotReleased], and the client goes
// on in the background until Redis has answered or the TTL has passed. When a process
// dies, its locks are free after their TTL and its places in the queue are skipped.
//
// [Client.Shutdown] returns when its context ends, at the latest. Its error says what it
// could not wait for, and a later Close or Shutdown returns the same.
//
// Errors are compared with [errors.Is]. That of a refused caller matches
// [ErrNotAcquired], the context's error if it ended, and the last error of Redis.
// At most one line a minute is logged for each cause, but every lost lease is logged.
// Lock names are logged at level Debug only.
//
// User code never runs under a mutex of this package, nor on the goroutines that renew
// leases, end them, or receive messages. The logger, the loss handler, and the
// OpenTelemetry calls that report losses and ends run on goroutines that no lock waits
// for: if they block, later calls wait, and finally are dropped; if they panic, that is
// logged through [slog.Default]. The spans and measurements of a caller and the back-off
// policy may be called on the caller's goroutine. Hooks of the Redis client run as part of
// its commands: one that blocks is like a Redis that does not answer.
//
// # Memory model
//
// In the terminology of the Go memory model, the n'th call of Unlock synchronizes
// before the m'th return of Lock on the same lock of the same Client, for any
// n < m. For any call of RLock there is an n such that the n'th Unlock
// synchronizes before the return of RLock, and the RUnlock that belongs to it
// before the return of the n+1'th Lock. A call of TryLock or TryRLock that returns
// true is equivalent to one of Lock or RLock; one that returns false establishes
// no relation.
//
// There is no such relation between processes, which share no memory, nor between
// two Clients of one process, although they exclude each other.
package leased
