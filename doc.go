// Package leased provides mutual exclusion among the processes of a service: a
// [Mutex] and an [RWMutex] kept in Redis, with the methods of [sync.Mutex] and
// [sync.RWMutex]. The name says what differs from package sync: a lock is held on
// lease, and a lease can be lost.
//
// # Limits
//
// These come first, because no lock of this kind can promise more.
//
// A lease can end while its holder works. [Lease.Context] then ends with cause
// [ErrLeaseLost]. How soon that is depends on why:
//
//   - Redis cannot be reached: on the local clock, before the lease's TTL can
//     have ended on the server. Nobody else can have been inside by then.
//   - The lock's key was deleted, replaced, flushed or evicted, or a failover
//     lost it: within one renewal period, a third of the TTL, while Redis
//     answers. In that time two owners can exist.
//   - An operator called [Client.ForceUnlock]: when the message arrives. If the
//     message is lost, within one renewal period. In that time, too, two owners
//     can exist.
//
// A process that is stopped, by its scheduler, a debugger or a suspended
// machine, learns of all this when it runs again, and its next write may leave
// before it looks. What closes these gaps is the fencing token: a number that
// grows with every lease ([Lease.Token]). Let the protected resource keep the
// greatest one it has seen, and refuse smaller ones. Without that check, at the
// resource, a lease makes double work rare and not impossible.
//
// A failover can lose the last writes, since Redis replicates asynchronously. A
// lost grant means two owners until the first of them renews. A lost release
// means that the old owner is recorded again: if another process wants the lock,
// the old owner's process is asked and gives it back, else the TTL ends it.
// Tokens go on growing through a failover unless the new primary's clock is
// behind the old one's by more than the failover took.
//
// A Redis that evicts keys when its memory is full evicts locks, the volatile-*
// policies included, for every key of ours has an expiry. Use noeviction for a
// database that holds locks.
//
// TTLs run on the server's clock. Set forward, it ends leases early; their holders
// learn that from the next renewal, and until then two owners can exist. Set back,
// it prolongs them; whoever sees an owner with more time left than its own TTL
// cuts that down.
//
// Tokens grow because that clock does, and while it is back because Redis keeps
// the last one. Of those that a process gives out among its own callers Redis
// hears when the process lets go. So there is one case in which tokens do not
// grow, until the clock has caught up: it went back, and Redis does not know the
// last of them, because an owner died that had given out some by itself, or
// because the keys were flushed or lost as well.
//
// A foreign client that polls for the lock's key with SET NX starves while
// processes of ours are queued: a release hands the lock to the first of them in
// the same step, so the poller never sees it free. It is excluded correctly, and
// so are we while it owns the lock.
//
// With a [redis.Client], a waiter to whom PUBLISH reaches nobody is taken for
// dead and skipped. A proxy that sends the subscriptions and the commands of one
// client to different servers makes every waiter look like that. The lock stays
// exclusive, but waiting then is polling, and its order is lost. Behind such a
// proxy, connect to the server itself.
//
// Order is that of arrival among processes in Redis, and among callers in a
// process. It is not that of arrival among all callers of all processes: a
// process that has the lock may serve some of its own callers first, within the
// bounds of [WithLocalHandoffs].
//
// Whoever may write the lock's keys, or publish to the clients' channels, can
// break the lock. What is read from there is checked for its form, not for its
// author.
//
// # Use
//
// A [Client] is one owner in the eyes of Redis. Make one for a process and keep
// it. [Client.Mutex] returns a handle; all handles of one name in one Client are
// one lock.
//
// A [Mutex] has two faces. Lock, TryLock and Unlock are those of sync.Mutex. They
// return no errors: Lock waits for whatever time or an operator can mend, and a
// lost lease is told to the handler of [WithLossHandler]. LockContext,
// TryLockContext and Do take a context, return errors, and give a [Lease] that
// knows whether it is still good. Code that can stop halfway should use the
// second face, and pass Lease.Context to its work.
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
// Readers and writers wait in one queue, first come, first served. Somebody who
// waits for Lock keeps later readers out, in whatever process they are; readers
// who wait right behind a writer are let in together. So a stream of readers does
// not starve a writer, nor writers a reader. It also means that RLock must not be
// called by one who holds it already: if a writer came in between, each waits for
// the other.
//
// The readers of one process share one grant. The first one asks Redis, further
// ones enter without a command, and the last one gives the grant back. Once
// somebody is known to wait behind it, it admits nobody new: RLock queues, and
// TryRLock is refused at once. A writer who waits behind readers of its own
// process has its place in the queue before they have left, so readers of other
// processes do not enter before it either: it waits for those who are inside.
//
// In Redis the readers of each process have an expiry of their own. Those of a
// process that died delay a writer by their own TTL at most, however long others
// read. The token of a shared grant is greater than that of every earlier writer
// and smaller than that of every later one; its readers have it in common.
//
// [Lease.Downgrade] makes a writer a reader, with no gap in which another could
// write. A reader cannot become a writer: two that both wanted it would wait for
// each other for ever. Let go, lock for writing, and look again at what was read.
//
// # States
//
// Two things are told apart. A grant is what Redis gave to this process. A lease
// is what one caller has between Lock and Unlock. One grant serves many leases,
// one after another, so most of what happens inside a busy process needs no
// message to Redis.
//
//	none ──► asking ──► queued ──► held ──► letting go ──► none
//	            │                  ▲  │           │
//	            └── it was free ───┘  │           └── yield ──► queued, or held
//	                                  └── lost ──► none
//
//	asking      a command is on its way
//	queued      others have the lock; a message or a re-check will tell
//	held        callers enter, or the grant idles (WithIdleHold)
//	letting go  nobody is inside, and others want the lock or nobody here does;
//	            yield is a release that queues again, for callers who wait here
//
// A downgrade happens within held: the grant gets another id, and until the
// answer comes either id may be the one that owns.
//
// While a grant is held, its callers enter in the order they came. When another
// process is known to want the lock, at most so many leases and so much time are
// given out locally before the lock goes there; see WithLocalHandoffs. Even if
// that message was lost, a lock in continuous use is offered to others about once
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
// its arrival. [Lease.TrustedUntil] tells the end of the window.
//
// Renewal is asked for after a third of the TTL, for all locks of a client
// together. It has three outcomes. Renewed moves the window. Not ours ends the
// lease at once. No answer is not a loss: it is asked again until the window
// ends, and only then is the lease lost. A late "renewed" revives nothing.
//
// The window is looked at before every entry, also before those that need no
// Redis. Where the wall clock and the monotonic clock have moved apart, as after
// a suspend, the grant is confirmed before anybody enters.
//
// # Waiting
//
// A process that finds the lock taken leaves one request in a queue in Redis,
// however many of its callers wait. The script that releases the lock makes the
// first live request the owner in the same step and publishes one message, to the
// client it came from. Nobody else wakes, and nobody has to win a race.
//
// Messages can be lost, so a waiter also looks again by itself: when its
// subscription was renewed, when the owner's TTL ends, and after a third of its
// own TTL or 3 s, whichever is less, shortened at random by up to a third. These
// re-checks keep its place; a request without them is dropped by those behind it.
// They also have the server send an echo, and if none comes within 1 s the
// subscription is rebuilt.
//
// If the server does not permit subscribing or publishing, or the owner is a
// foreign client, waiting is polling, from every 50 ms to every 3 s or third of
// the TTL.
//
// When the context of LockContext ends, the caller leaves at once and the request
// stays with those who still wait in the process. If none does, it is taken out
// of Redis. If the lock arrives at the same instant, it goes to the next local
// caller, or back.
//
// # Failures
//
// Every command carries the id of its request and may run twice. A question
// without an answer is asked again under the same id. A release without an answer
// is followed by cancelling its id until no late command can bring it back, while
// the lock goes on under a fresh one. Nothing that another id owns is ever
// released, extended or renewed.
//
// What may pass, such as a lost connection, a failover or a loading server, is
// waited out, with the pauses of [WithBackOff]. What only an operator can mend
// (NOAUTH, NOPERM, WRONGTYPE, protected mode) is returned by LockContext at once,
// and waited for by Lock. Bad names, bad options, a closed client and a closed
// *redis.Client are errors of LockContext and panics of Lock.
//
// Unlock waits for Redis at most as long as [WithReleaseTimeout] says. After that
// it returns [ErrNotReleased], and the client goes on in the background until
// Redis has answered or the TTL has passed. A release that had no answer is proved
// by what Redis says afterwards; where that proves nothing, the lock may have been
// another's meanwhile, and Unlock returns [ErrLeaseLost]. When a process dies, its locks are
// free after their TTL and its places in the queue are skipped.
//
// Errors are compared with [errors.Is]. That of a refused caller matches
// [ErrNotAcquired], the context's error if it ended, and the last error of Redis.
// What is logged is one line a minute for each cause, without lock names, except
// that every lost lease is told.
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
