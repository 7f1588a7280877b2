package leased

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// A Lease is what a caller of LockContext holds until Unlock. It is safe for concurrent use. The
// methods of a nil or zero Lease return an error or, if they return none, panic.
//
// Keep the lease, or one of its contexts, reachable while the work goes on. If all of them are
// garbage-collected before Unlock, the lease is no longer renewed, which is logged, and other callers
// of this process are kept out until [Mutex.Unlock]. [Lease.Context] says what keeps a lease from being
// collected.
type Lease struct {
	entry *entry
	call  *call
	guard *guard          // nil from Unlock on
	ctx   context.Context // guarded by the entry's mutex; see contexts

	ending atomic.Pointer[ending] // nil until Unlock is called
}

// ending is how far the first call of Unlock has come.
type ending struct {
	over   bool
	result error         // what it returned, if it is over
	waited chan struct{} // closed once it is over, if another call waits for that
}

// Shared values, so that most calls of Unlock allocate nothing.
var (
	underWay  = &ending{}
	endedWell = &ending{over: true}
)

// A guard notices that a Lease is garbage-collected before Unlock: its finalizer runs then. It is
// an object of its own because, unlike the Lease, it refers to no user object that may refer back
// to the lease. A finalizer takes less memory than a cleanup of the Lease would.
type guard struct {
	entry *entry // nil while no lease has the guard
	call  *call
}

// guards holds the guards of leases that were unlocked. They keep their finalizers: to set one for
// each lease and to remove it took a ninth of the time in which a process passes a lock on.
var guards = sync.Pool{New: func() any {
	g := new(guard)
	runtime.SetFinalizer(g, (*guard).collected)
	return g
}}

// made returns l if LockContext, or a method like it, returned it, and panics otherwise.
func (l *Lease) made() *Lease {
	if l.unmade() {
		panic(errLeaseUnmade)
	}
	return l
}

// unmade reports whether l is nil or the zero value, as it is after an error of
// LockContext.
func (l *Lease) unmade() bool { return l == nil || l.entry == nil }

func newLease(ctx context.Context, e *entry, w *call) *Lease {
	g := guards.Get().(*guard)
	g.entry, g.call = e, w
	return &Lease{entry: e, call: w, guard: g, ctx: ctx}
}

// collected is the finalizer. It stops the renewal of a lease that can no longer be
// unlocked through its Lease.
func (g *guard) collected() {
	e := g.entry
	if e == nil {
		return // the guard was in the pool
	}
	e.mu.Lock()
	mine, site := e.stateLocked().Collected(g.call.caller()), g.call.extras().site
	e.restLocked()
	e.mu.Unlock()
	if mine {
		e.client.log.collected(e.keys.Name(), site)
	}
}

// Token returns the lease's fencing token. It is positive and below 2^53, so it fits a
// BIGINT and a JSON number. A writer's token is greater than that of every earlier lease of
// the lock. A reader's token is greater than that of every earlier writer and smaller than
// that of every later writer. Both hold unless the server's clock is set back, or the lock
// was lost and this process has not noticed: callers that it then admits without asking
// Redis can get a token below that of an owner in between. See the package's limits. The
// tokens of readers in different processes are in no particular order, so compare a reader's
// token only with a writer's.
//
// Tokens protect a resource from owners that do not know yet that they lost the lock. To be
// safe, the resource stores the greatest token of any writer, and every access presents the
// token of its lease. The first access of a writer raises the stored token, and the
// writer's writes require that the stored token is still its own. Any access with a smaller
// token is refused. A first access with an equal token is refused as well: while two
// processes own the lock, as can happen after a FLUSHALL, both draw tokens from the same
// clock, and can draw the same token. Comparing tokens only at the write does not protect
// what was read before. A reader's token is compared but never stored; after Downgrade a
// lease has a reader's token.
func (l *Lease) Token() uint64 {
	l.made().entry.mu.Lock() // a downgrade changes the token
	defer l.entry.mu.Unlock()
	return l.call.Token
}

// TrustedUntil returns the time, on this machine's clock, until which the lease can be
// trusted as far as is known now. Each renewal moves it. Once the lease has ended, the time
// is not in the future.
func (l *Lease) TrustedUntil() time.Time {
	e := l.made().entry
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.restLocked()
	return onWallClock(e.stateLocked().TrustedUntil(l.call.caller(), time.Now()))
}

// Unlock ends the lease. It waits for Redis for at most the time set by [WithReleaseTimeout].
// It does not wait if the lock goes to another caller of this process, if other readers of
// the process still hold it, or if the process keeps it ([WithIdleHold]). In these cases, nil
// does not say that the lock was still this client's. Unlock returns
//
//   - ErrLeaseLost, with the reason, if the lease had ended before, or if the release, or an
//     earlier command about the lease, got no reply, or an error instead of one, and it could not be
//     proved afterwards that the lock was this client's until then;
//   - ErrNotReleased if Redis did not confirm the release in time; if it never will,
//     because the client is closed, the error also matches ErrClosed;
//   - both if both happened.
//
// In all cases the caller no longer holds the lock. Do not drop the error: it may be the
// only sign that another process was in the critical section. Calls after the first one has
// returned do nothing and return the same error, even if the lease was ended by [Mutex.Unlock].
// If the first call panicked in a hook of the Redis client, they return what was known at
// that point.
func (l *Lease) Unlock() error { return l.unlock(releaseWait{}) }

// UnlockContext is Unlock, except that it waits for Redis until ctx ends instead of for the
// time set by [WithReleaseTimeout]. A deferred release should usually be Unlock: under a context that has
// ended, such as that of a request, UnlockContext does not wait to learn whether the lock was released.
//
// If ctx ends first, the error matches [ErrNotReleased] and
// ctx's error. The lease has ended all the same, even if ctx had ended before the call, and
// the client keeps trying to release the lock. Of several calls of Unlock and UnlockContext
// the first one releases the lock. The others wait for its result, each no longer than it would
// wait for Redis, and return an error that matches ErrNotReleased if that is not long enough.
// If ctx is nil, the call returns an error and ends nothing. Do not pass a context of the lease
// itself: it ends with the call, which then does not wait for Redis.
func (l *Lease) UnlockContext(ctx context.Context) error {
	if l.unmade() {
		return errLeaseUnmade
	}
	if ctx == nil {
		return notDone(l.entry.keys.Name(), "unlocked", errNilContext)
	}
	return l.unlock(releaseWait{ctx})
}

// unlock does what the first call of Unlock or UnlockContext does, and returns its result to all. It waits
// for as long as t says.
func (l *Lease) unlock(t releaseWait) error {
	if l.unmade() {
		return errLeaseUnmade
	}
	if !l.ending.CompareAndSwap(nil, underWay) {
		return l.unlockedByAnother(t)
	}
	*l.guard = guard{}
	guards.Put(l.guard)
	l.guard = nil
	var err error
	returned := false
	defer func() {
		if !returned { // user code panicked or ended the goroutine; later calls are told what is known
			err = l.entry.conclude(l.call)
		}
		end := endedWell
		if err != nil {
			end = &ending{over: true, result: err}
		}
		if before := l.ending.Swap(end); before.waited != nil {
			close(before.waited)
		}
	}()
	_, err = l.entry.unlock(t, time.Now(), func(*lockstate.Lock) *lockstate.Caller { return l.call.caller() })
	returned = true
	return err
}

// unlockedByAnother returns the result of the first call of Unlock or UnlockContext, after waiting for it
// for as long as t says.
func (l *Lease) unlockedByAnother(t releaseWait) error {
	var first *ending
	for {
		if first = l.ending.Load(); first.over {
			return first.result
		}
		if first.waited != nil {
			break
		}
		l.ending.CompareAndSwap(first, &ending{waited: make(chan struct{})})
	}
	w, e := l.call, l.entry
	over, late := t.await(w, time.Now(), first.waited)
	if over {
		return l.ending.Load().result
	}
	err := &notReleased{name: e.keys.Name(), ended: late}
	e.mu.Lock()
	defer e.mu.Unlock()
	if w.Ended == lockstate.ByLoss {
		return e.lostLocked(w, err)
	}
	return err
}

// LossEvent describes a lease that ended before its Unlock. Very rarely, no caller has had it: if it ended
// after its caller was admitted, and LockContext returned an error because its context had ended meanwhile.
type LossEvent struct {
	Name   string        // of the lock
	Token  uint64        // of the lease
	Reason string        // human-readable
	Err    error         // matches ErrLeaseLost, and ErrMaxHold at the end of a maximum hold
	TTL    time.Duration // of the handle that it was locked with
}

// checkPatience bounds the wait of a Check, which may have to wait for the renewal of another check before
// its own is sent, and in a Cluster for a reload of the slots. A renewal without an answer ends a moment
// earlier, and its error says more.
const checkPatience = protocol.CommandTimeout + 10*time.Millisecond

// Check asks Redis now whether this client still owns the lock. It is for work that should not wait for
// the next renewal to find out, such as a write that cannot present the token. It costs a round trip;
// concurrent checks of a lock share one.
//
// A nil error means that this client owned the lock when Redis answered; the lease is then trusted anew
// from the time before Check asked. It promises nothing about later: for that, use the token. If this
// client does not own the lock, the lease is lost, and so are all leases that the process holds under
// the same grant. The error then matches [ErrLeaseLost] and gives the reason, as does the error for a
// lease that had already ended. Check waits for Redis until ctx ends, or for 2 s if that is sooner. The
// error of ctx, an error that Redis returned instead of an answer, and the error of a Redis that does
// not answer say nothing about the lease, which goes on until its trust window ends. If the client is
// closed meanwhile, the error matches [ErrClosed], and the lease is no longer renewed, unless ctx is
// one that the client has ended because it is being closed: then the lease goes on until
// [Client.Shutdown] is done.
func (l *Lease) Check(ctx context.Context) error {
	if l.unmade() {
		return errLeaseUnmade
	}
	if ctx == nil {
		return notDone(l.entry.keys.Name(), "checked", errNilContext)
	}
	w, e := l.call, l.entry
	failed := func(why error) error { // ctx may have ended with the lease
		if _, over := l.over("checked"); over != nil {
			return over
		}
		return notDone(e.keys.Name(), "checked", why)
	}
	if ctx.Err() != nil {
		return failed(e.client.ended(ctx))
	}
	var k lockstate.Check
	done := make(chan struct{})
	e.step(func(now time.Time, fx *lockstate.Effects) { e.stateLocked().Check(&k, w.caller(), done, now, fx) })
	inTime, stop := context.WithTimeout(ctx, checkPatience)
	defer stop()
	err := e.client.await(inTime, done)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return failed(e.client.ended(ctx))
	case inTime.Err() != nil:
		return failed(redisserver.ErrLateAnswer)
	default:
		return failed(err)
	}
	if k.Err != nil {
		return failed(k.Err)
	}
	e.mu.Lock()
	lost := w.Ended == lockstate.ByLoss
	e.mu.Unlock()
	if k.Over || lost {
		_, over := l.over("checked")
		return over
	}
	return nil
}

// Downgrade turns a lease for writing into one for reading. No writer gets the lock in between, and
// readers that wait directly behind may enter. From then on the lease is a reader's, so RWMutex.Unlock
// panics, but Lease.Unlock ends it as before. It has the token of the shared grant, which is greater.
// The lease is renewed throughout.
//
// Downgrade waits for Redis until ctx ends; the error then matches ctx's error and the last error of
// Redis. If the client is closed meanwhile, the error matches [ErrClosed]. A downgrade that has begun
// cannot be undone: the client keeps retrying it as long as the lease lasts. If ctx has ended before
// the call, no downgrade begins. Downgrade returns [ErrLeaseLost] if the lease is lost or has ended,
// and returns nil at once if it is already a reader's.
//
// As in sync.RWMutex, a reader cannot become a writer: two readers that both upgraded would wait for
// each other forever. Instead, unlock, lock for writing, and read again.
func (l *Lease) Downgrade(ctx context.Context) error {
	if l.unmade() {
		return errLeaseUnmade
	}
	if ctx == nil {
		return notDone(l.entry.keys.Name(), "downgraded", errNilContext)
	}
	w, e := l.call, l.entry
	if ctx.Err() != nil {
		if shared, over := l.over("downgraded"); over != nil || shared {
			return over
		}
		return notDone(e.keys.Name(), "downgraded", e.client.ended(ctx))
	}
	done := make(chan struct{})
	e.step(func(now time.Time, fx *lockstate.Effects) { e.stateLocked().Downgrade(w.caller(), done, now, fx) })
	err := e.client.await(ctx, done)
	switch shared, over := l.over("downgraded"); {
	case over != nil || shared:
		return over // ctx may have ended with the lease
	case err == nil:
		return notDone(e.keys.Name(), "downgraded", errLeaseOver, ErrLeaseLost)
	}
	e.mu.Lock()
	lastErr := e.stateLocked().LastErr()
	e.mu.Unlock()
	goesOn := "still trying, and the lease goes on"
	if e.client.base.Err() != nil {
		goesOn = "no longer tried"
	}
	text, is := fmt.Sprintf("leased: downgrade of lock %q not confirmed; %s: %s", e.keys.Name(), goesOn, bare(err)), []error{err}
	if lastErr != nil && ctx.Err() != nil {
		text, is = fmt.Sprintf("%s (last Redis error: %s)", text, bare(lastErr)), append(is, lastErr)
	}
	return &textError{text, is}
}

// over returns the error for a lease that was lost or unlocked, and so could not be checked or downgraded.
// For one that goes on it returns nil, and whether it is a reader's.
func (l *Lease) over(what string) (shared bool, err error) {
	w, e := l.call, l.entry
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case w.Ended == lockstate.ByLoss:
		return false, e.lostLocked(w, nil)
	case w.Phase != lockstate.Inside:
		return false, notDone(e.keys.Name(), what, errLeaseOver, ErrLeaseLost)
	}
	return w.Mode == protocol.Shared, nil
}
