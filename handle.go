package leased

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// What Mutex and RWMutex have in common: their methods are those of handle, for a mode. acquire.go has
// what happens to one call of them.

// handle is what a Mutex or an RWMutex consists of: a name and options.
type handle struct {
	client *Client
	keys   protocol.Keys
	label  *string      // the lock's label in metrics; nil: it has none
	opts   *lockOptions // shared by all handles that were given no options
	err    error        // of the name or the options; returned on use

	kept atomic.Pointer[entry] // for reenter; nil until the process was seen to keep the lock
}

// init makes h a handle of the lock called name.
func (h *handle) init(c *Client, name string, opts []LockOption) {
	if c.unmade() {
		h.err = errClientUnmade
		return
	}
	h.client = c
	if h.keys, h.err = protocol.NewKeys(c.opts.prefix, name); h.err != nil {
		h.keys.Lock = name[:min(len(name), maxShownName)] // for the errors, which name it
		return
	}
	h.label = c.labelOf(name)
	h.opts, h.err = c.lockOptions(opts)
}

// lockOptions returns the client's options for locks, changed by opts. Handles without opts share them.
func (c *Client) lockOptions(opts []LockOption) (*lockOptions, error) {
	if len(opts) == 0 {
		return &c.opts.lock, nil
	}
	own, err := c.opts.lock.with(opts)
	if q := c.opts.quarantine; err == nil && q > 0 && own.TTL > q {
		err = invalid("TTL %v is longer than the quarantine of %v", own.TTL, q)
	}
	return &own, err
}

// labelOf returns the label of a lock in metrics. It calls user code, on the goroutine of the user
// who makes a handle.
func (c *Client) labelOf(name string) *string {
	if c.opts.lockLabel == nil {
		return nil
	}
	defer c.recoverPanic("the function of WithLockLabelInMetrics")
	if label := c.opts.lockLabel(name); label != "" {
		return &label
	}
	return nil
}

// maxShownName is how many bytes of a bad name an error shows.
const maxShownName = 512

// unmade reports whether h is the zero value, which no method of a client has made.
func (h *handle) unmade() bool { return h.client == nil && h.err == nil }

// misused returns the error of a call that has done nothing because, as err says, the handle or an
// argument is bad. The error matches err and is.
func (h *handle) misused(what string, err error, is ...error) error {
	if h.client == nil {
		return &textError{err.Error(), append(is, err)}
	}
	return notDone(h.keys.Name(), what, err, is...)
}

func (h *handle) lock(m protocol.Mode) {
	now := time.Now()
	if h.reenter(m, now) {
		return
	}
	w := &call{Mode: m, RetryFatal: true}
	e, err := h.acquire(context.Background(), w, now)
	if err != nil {
		if h.anotherIsInside() {
			h.client.awaitUnused(h.keys.Lock)
		}
		panic(err)
	}
	h.rememberKept(e, w)
}

// anotherIsInside reports whether the client is being closed while a caller is inside, in any mode. The panic
// of Lock may run an Unlock or RUnlock that was deferred before, by code that locks again after an Unlock, as
// sync.Cond does. Nobody could tell it from the Unlock of the caller that is inside. So Lock panics only when
// that one has left, unless Shutdown is done before.
func (h *handle) anotherIsInside() bool {
	if h.client == nil || !h.client.closes() || isClosed(h.client.stopped) {
		return false
	}
	e := h.client.lookup(h.keys.Lock)
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	_, inside := e.stateLocked().Counts()
	return !e.dead && inside > 0
}

func (h *handle) tryLock(m protocol.Mode) bool {
	now := time.Now()
	if h.reenter(m, now) {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), tryLockWait)
	defer cancel()
	w := &call{Mode: m, Try: true}
	e, err := h.acquire(ctx, w, now)
	if err == nil {
		h.rememberKept(e, w)
	}
	if h.err != nil || errors.Is(err, ErrClosed) && !h.anotherIsInside() {
		panic(err)
	}
	return err == nil
}

// unlock ends the lease of a caller inside in mode m, and panics if there is none.
func (h *handle) unlock(m protocol.Mode) {
	now := time.Now()
	if h.leaveKept(m, now) {
		return
	}
	if h.err != nil {
		panic(h.misused("unlocked", h.err))
	}
	var found bool
	var err error
	if e := h.client.lookup(h.keys.Lock); e != nil {
		found, err = e.unlock(releaseWait{}, now, func(l *lockstate.Lock) *lockstate.Caller { return l.PickHolder(m) })
	}
	if !found {
		what := "unlock"
		if m == protocol.Shared {
			what = "RUnlock"
		}
		panic(&textError{fmt.Sprintf("leased: %s of unlocked mutex %q", what, h.keys.Name()), []error{ErrNotLocked}})
	}
	if errors.Is(err, ErrNotReleased) {
		h.client.log.unconfirmed(h.keys.Name(), err)
	}
}

func (h *handle) unlockContext(ctx context.Context, m protocol.Mode) error {
	if h.err != nil {
		return h.misused("unlocked", h.err)
	}
	if ctx == nil {
		return h.misused("unlocked", errNilContext)
	}
	if e := h.client.lookup(h.keys.Lock); e != nil {
		if found, err := e.unlock(releaseWait{ctx}, time.Now(), func(l *lockstate.Lock) *lockstate.Caller { return l.PickHolder(m) }); found {
			return err
		}
	}
	return h.misused("unlocked", ErrNotLocked)
}

func (h *handle) lease(ctx context.Context, w *call) (*Lease, error) {
	w.Leased = true // before it can be admitted, so that RUnlock prefers callers without a lease
	e, err := h.acquire(ctx, w, time.Now())
	if err != nil {
		return nil, err
	}
	if w.Events != nil {
		ctx = e.underHoldSpan(ctx, w)
	}
	return newLease(ctx, e, w), nil
}

func (h *handle) do(ctx context.Context, m protocol.Mode, f func(context.Context) error) (err error) {
	if f == nil && h.err == nil {
		return h.misused("acquired", errNilFunc, ErrNotAcquired)
	}
	l, err := h.lease(ctx, &call{Mode: m})
	if err != nil {
		return err
	}
	defer func() { // before With and its cancel, which may call user code: a method of ctx that panics
		switch e := l.Unlock(); {
		case e == nil || reportsLoss(err, e):
		case errors.Is(e, ErrLeaseLost):
			err = errors.Join(err, e)
		default:
			h.client.log.unconfirmed(h.keys.Name(), e)
		}
	}()
	work, cancel := l.With(ctx)
	defer cancel()
	return f(work)
}

// If the process keeps a lock, calls of Lock and RLock take a shortcut, reenter, and their Unlock
// takes another one, leaveKept. Neither allocates, or looks the lock up in the client's table. They
// apply only if calls need not be reported one by one: no tracer or meter records, and no threshold
// is set for slow callers.

// rememberKept remembers e for later calls if w, which e admitted, found that the process had kept the
// lock.
func (h *handle) rememberKept(e *entry, w *call) {
	if w.Via == lockstate.ViaIdle || w.Via == lockstate.ViaLocal {
		h.kept.Store(e)
	}
}

// reenter lets a caller without a lease enter at once if it can, and reports whether it did.
func (h *handle) reenter(m protocol.Mode, now time.Time) bool {
	e := h.kept.Load()
	if e == nil || h.client.observed() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dead {
		return false
	}
	l := e.stateLocked()
	w := e.awake.spare
	if w == nil {
		w = &call{}
	}
	e.awake.spare = nil
	*w = call{Mode: m, Opts: &h.opts.Terms, Again: true}
	if !l.Reenter(w.caller(), now) {
		e.awake.spare = w
		return false
	}
	if w.Via != lockstate.ViaIdle { // otherwise the alarm is early enough, see Reenter
		e.setAlarmLocked()
	}
	h.client.stats.countAdmission(w.Via)
	return true
}

// leaveKept lets a caller that entered by reenter leave if nothing follows from that, and reports
// whether it did. A tracer or meter that was set up since then is not told of the hold.
func (h *handle) leaveKept(m protocol.Mode, now time.Time) bool {
	e := h.kept.Load()
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dead {
		return false
	}
	l := e.stateLocked()
	c := l.PickHolder(m)
	if c == nil || !c.Again {
		return false
	}
	behind, ok := e.behindLocked(callOf(c))
	if !l.LeaveKept(c, now) {
		return false
	}
	if ok {
		h.client.stats.behind[behind].Add(1)
	}
	if till := l.IdleUntil(); till != 0 && (e.due == 0 || till < e.due) { // otherwise the alarm is early enough, see LeaveKept
		e.setAlarmLocked()
	}
	e.awake.spare = callOf(c)
	return true
}

// observed reports whether every call has to be reported: to a tracer, to a meter, or to the watch
// for slow callers.
func (c *Client) observed() bool {
	ctx := context.Background()
	return c.slow.threshold > 0 || c.tracing.tracer() != nil || c.metrics.wait.Enabled(ctx) || c.metrics.measuresHolds()
}
