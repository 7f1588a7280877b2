package leased

import (
	"errors"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// One lock in use, and how its state machine runs: an event enters under the entry's
// mutex and the effects are performed after unlocking, which is the order of this file:
// step, perform, run, and answered, which is the next step.
//
// Its goroutine is the sender: one for each command, started by dispatch, owned by the
// client, ended by the reply or the command's time-out, waited for by Shutdown. A caller
// who would wait for the reply anyway runs the command in its own goroutine instead.

// entry is one lock in use.
type entry struct {
	alarm
	client *Client
	keys   protocol.Keys
	label  *string // what stands for it in metrics; nil: nothing does

	mu      sync.Mutex // guards what follows, and alarm.due; for its order see Client.mu
	awake   *awake     // nil while the lock rests; for all else see state
	resting lockstate.Resting
	dead    bool // removed from the table; find makes another entry
	recent  bool // among the client's recent locks, or about to be
}

// A client may hold very many locks, for most of which nobody waits. These rest between two
// steps, and share the large state machines of those that do not.

// awake is what a lock has that does not rest.
type awake struct {
	lock      lockstate.Lock
	contended bool // whether callers or other processes waited for the holders after the last step

	// spare is for the next reenter, nil if there is none. A call that entered by it and left by
	// leaveKept is referred to by nothing any more: its goroutine has not looked at it since it
	// entered, it was in no effect, and whoever else looks at callers finds them in the lock.
	spare *call

	// These two belong to the command in flight; while there is none, to the holder of the
	// entry's mutex.
	warned bool    // whether the warning about a foreign owner was logged
	pauses BackOff // nil unless the last command failed
}

// idleStates has state machines that no lock uses.
var idleStates = sync.Pool{New: func() any { return new(awake) }}

// state returns the state machine of the lock, which wakes up if it rests. It is for use under
// e.mu only, and until restLocked.
func (e *entry) state() *lockstate.Lock {
	if e.awake == nil {
		e.awake = idleStates.Get().(*awake)
		e.awake.lock.Wake(&e.resting, (*environment)(e.client))
	}
	return &e.awake.lock
}

// restLocked lets the lock rest, if it can. It follows what was done for Redis, for the time or
// for someone who looks, but not what a caller of the lock has done, nor what has let one in:
// others come next, or its Unlock; see recentLocks.
func (e *entry) restLocked() {
	if e.awake == nil || e.awake.lock.CommandInFlight() { // the pauses are that command's
		return
	}
	if e.awake.pauses == nil && e.awake.lock.Rest(&e.resting) {
		e.sleepLocked()
	}
}

// restAfterLocked ends a step: the lock rests, unless a caller's wait has ended. It returns true if
// the lock has to be added to the recent ones when e.mu is unlocked.
func (e *entry) restAfterLocked(ended bool) (becameRecent bool) {
	if !ended {
		e.restLocked()
		return false
	}
	becameRecent, e.recent = !e.recent, true
	return becameRecent
}

// recentLocks are the locks that callers were let into last. Being let in does not have them rest before
// others take their places: most leases are short, and to put the state away and get it out again is a tenth of
// what this package does for one. Who holds very many locks has few of them here.
type recentLocks struct {
	places [64]atomic.Pointer[entry]
	next   atomic.Uint32
}

// add adds e, whose recent has been set, and lets the lock rest whose place it takes. No mutex of
// an entry is held.
func (r *recentLocks) add(e *entry) {
	before := r.places[r.next.Add(1)%uint32(len(r.places))].Swap(e)
	if before == nil {
		return
	}
	before.mu.Lock()
	before.recent = false
	before.restLocked()
	before.mu.Unlock()
}

// sleepLocked gives the state machine to another lock.
func (e *entry) sleepLocked() {
	*e.awake = awake{}
	idleStates.Put(e.awake)
	e.awake = nil
}

// step gives the lock an event and performs what follows from it.
func (e *entry) step(event func(now time.Time, fx *lockstate.Effects)) {
	now := time.Now()
	var fx lockstate.Effects
	e.mu.Lock()
	event(now, &fx)
	idle := e.rearmLocked(&fx)
	becameRecent := e.restAfterLocked(fx.Woken.Any())
	e.mu.Unlock()
	e.perform(&fx, idle, 0)
	if becameRecent {
		e.client.recent.add(e)
	}
}

// rearmLocked ends every step: it notes under which span its command is to be sent, sets
// the alarm that the lock's state asks for, and reports whether the lock is idle, so that
// the entry can be removed.
func (e *entry) rearmLocked(fx *lockstate.Effects) (idle bool) {
	e.traceHoldersLocked()
	if fx.Send.Verb != protocol.None {
		if c := e.state().Served(); c != nil && callOf(c).under() != nil {
			fx.Send.Under = callOf(c).under()
		}
	}
	e.setAlarmLocked()
	return e.state().Idle()
}

// setAlarmLocked sets the alarm that the lock's state asks for. An alarm that is early costs one
// look at the lock; moving it costs as much.
func (e *entry) setAlarmLocked() {
	due := e.state().Due()
	if at := e.due; due != 0 && (at == 0 || due < at) {
		e.client.watchdog.setInstant(e, due)
	}
}

// fire takes the step of the entry's alarm, and adds to batch the renewal that the lock
// asks for.
func (e *entry) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	var fx lockstate.Effects
	e.mu.Lock()
	if e.dead {
		e.mu.Unlock()
		return batch
	}
	e.client.watchdog.remove(&e.alarm) // it fired, but may be set again already
	e.state().Tick(now, &fx)
	if fx.Renew {
		batch = append(batch, protocol.Renewal{Owner: e, Keys: &e.keys, Req: e.state().Request(), At: now, Spare: fx.Spare, Touch: fx.Touch})
	}
	idle := e.rearmLocked(&fx)
	e.restLocked()
	e.mu.Unlock()
	e.perform(&fx, idle, 0)
	return batch
}

// perform does what a step decided, after e.mu was unlocked. (A renewal that nobody waits for
// is no part of it: it leaves in the watchdog's batch, see fire.) The effects are performed in this order:
//
//  1. Woken: callers admitted or rejected return from their wait. First, for this is a
//     hand-off inside the process, and what follows would delay it.
//  2. Ended: leases that ended before their Unlock. Before the next, so that an Unlock or
//     a Downgrade that returns the loss does so when the context has ended, the loss is
//     counted and the hold is recorded with its reason.
//  3. Gone and Done: an Unlock, a Downgrade or a Check that was waiting returns.
//  4. Cancels: requests go to the canceler. Before the entry is removed, for once the
//     table is empty Shutdown waits for the canceler to have tried all it has.
//  5. Check: a renewal that a caller waits for is sent, on a goroutine of the client.
//  6. Send: the lock's next command. Last, because it may run here, for as long as
//     inlineFor: zero starts a goroutine instead. A caller who would wait for the reply
//     anyway runs it here, for switching to another goroutine costs as much as the
//     command.
//  7. With nothing to send, an idle entry is removed from the table, if it still is idle.
//
// Several goroutines may perform steps of one lock at once, and a later step may overtake
// an earlier one. So no effect depends on another step's, but that a command is sent only
// after the reply to the one before was a step itself.
//
// Nothing is locked, and no user code is called except by a command that runs here: the
// watchdog, the inbox and renewals perform steps too, and nothing may hold them up.
func (e *entry) perform(fx *lockstate.Effects, idle bool, inlineFor time.Duration) {
	for w := range fx.Woken.All {
		if w.Entered {
			e.client.stats.admitted(w.Via)
		}
		if w.Ready != nil {
			w.Ready <- struct{}{}
		}
	}
	for _, loss := range fx.Ended {
		e.end(loss)
	}
	for _, caller := range fx.Gone {
		close(callOf(caller).extras().gone)
	}
	for _, done := range fx.Done {
		close(done)
	}
	for i := range fx.Cancels {
		cancel := fx.Cancels[i] // a copy that outlives fx
		for each := &cancel; each != nil; each = each.Then {
			each.Owner = e
		}
		e.client.canceler.add(&cancel)
	}
	if fx.Check != nil {
		e.sendCheck(*fx.Check)
	}
	if fx.Send.Verb != protocol.None {
		e.dispatch(fx.Send, inlineFor)
	} else if idle {
		e.client.retire(e)
	}
}

// sendCheck sends a renewal that a caller waits for.
func (e *entry) sendCheck(r protocol.Renewal) {
	r.Owner, r.Keys = e, &e.keys
	if !e.client.group.start(func() { e.client.renew([]protocol.Renewal{r}) }) {
		r.Err = ErrClosed
		e.step(func(now time.Time, fx *lockstate.Effects) { e.state().Renewed(&r, now, fx) })
	}
}

// end ends the context of a lease that ended before its Unlock. If the lease was lost, it
// is counted and recorded too; the loss handler and OpenTelemetry, which are user code,
// are called in goroutines that nothing else depends on.
func (e *entry) end(loss lockstate.Loss) {
	lost, cause := loss.Why != 0, ErrClosed // Caller.Ended may come from a later step
	e.mu.Lock()
	w := callOf(loss.Caller)
	cancel, token := w.extras().cancel, w.Token
	var held holdRecord
	var first bool
	if lost {
		cause = e.lostLocked(w, nil)
		held, first = e.takeHoldLocked(w, holdOutcome(w, nil), nil, time.Now(), time.Time{})
	}
	e.mu.Unlock()
	if cancel != nil {
		cancel(cause)
	}
	if !lost {
		return
	}
	c := e.client
	c.stats.lost.Add(1)
	if !c.losses.add(LossEvent{Name: e.keys.Name(), Token: token, Reason: loss.Why.String()}) {
		c.log.lossesDropped()
	}
	if first {
		c.tracing.later(func() { c.recordHold(&held) })
	}
}

// dispatch has a command run: in the caller's goroutine if inlineFor is positive, in a
// goroutine of the client otherwise. A command that does not honor deadlines could hold
// its caller for longer than that, so it never runs inline.
func (e *entry) dispatch(what protocol.Command, inlineFor time.Duration) {
	c := e.client
	var sending bool
	cmd := commands.Get().(*protocol.Command)
	*cmd = what
	if inlineFor > 0 && c.server.HonorsDeadlines() {
		if sending = c.group.add(); sending {
			defer c.group.finished()
			e.run(cmd, min(inlineFor, protocol.CommandTimeout))
		}
	} else {
		sending = c.group.start(func() {
			defer c.recoverPanic("a hook of the Redis client or the back-off policy")
			e.run(cmd, protocol.CommandTimeout)
		})
	}
	if !sending {
		e.answered(cmd, protocol.Answer{}, &protocol.Failure{Err: ErrClosed, Kind: protocol.NoAnswer}, maxRetryDelay)
	}
}

// commands has commands for dispatch. Nothing refers to one that was answered: servers copy what
// they keep of it.
var commands = sync.Pool{New: func() any { return new(protocol.Command) }}

// run sends a command and gives the lock the reply.
//
// It calls user code: hooks of the Redis client and the back-off policy. If that panics,
// the lock continues as after a command without a reply. The panic goes on: it is the
// caller's in the caller's goroutine, and is logged in one of the client's.
func (e *entry) run(cmd *protocol.Command, limit time.Duration) {
	c := e.client
	under, _ := cmd.Under.(trace.Span)
	ctx := c.deadlines.Within(limit)
	if under != nil {
		ctx = trace.ContextWithSpan(ctx, under)
	}
	returned := false
	defer func() {
		if !returned {
			e.answered(cmd, protocol.Answer{}, &protocol.Failure{Err: errPanicked, Kind: protocol.NoAnswer}, time.Second)
		}
	}()
	if cmd.Check {
		cmd.Echo = c.inbox.startProbe(cmd.At, lockstate.Silence(cmd.Place))
	}
	c.slotMap.await(ctx)
	began := c.metrics.commandBegins(ctx)
	a, err := c.server.Do(ctx, &e.keys, cmd)
	took := began.ended()
	if cmd.Echo != "" {
		receivers := protocol.NoEcho
		if err == nil && a.Outcome == protocol.Enqueued {
			receivers = a.Echo
		}
		c.inbox.probeSent(cmd.Echo, receivers)
	}
	fail := redisserver.Classify(err) // here, where nothing is locked: it calls methods of the error
	var pause time.Duration
	if fail != nil {
		pause = e.pause()
		c.inbox.requireProbe(fail)
		c.log.commandFailed(e.keys.Name(), err)
	} else {
		c.outage.answered(e.awake.pauses != nil) // it is awake, with a command in flight
		e.awake.pauses = nil
		if a.NoNotify && !e.awake.warned {
			e.awake.warned = true
			c.log.foreignOwner(e.keys.Name(), a.Blocker, a.Left)
		}
		if a.Echo == protocol.EchoDenied {
			c.publishDenied.Store(true)
			c.log.publishDenied()
		} else if a.Echo > 0 {
			c.publishDenied.Store(false)
		}
		c.stats.handed(a.Handed)
	}
	returned = true
	c.slotMap.commandFailed(fail) // before the step, whose commands are to find the right node
	e.answered(cmd, a, fail, pause)
	c.metrics.commanded(ctx, commandOf(cmd.Verb), took, fail)
	if fail != nil {
		// After the step: the outage ends when a probe finds no lock that waits out a pause,
		// and a probe in between would not find this one.
		c.outage.failed(fail)
	}
	*cmd = protocol.Command{}
	commands.Put(cmd)
}

var errPanicked = errors.New("leased: what a command called panicked")

// answered is the step that ends a command; fail is nil if there was a reply. It is written out,
// because the effects of a step whose event is a function value go to the heap.
func (e *entry) answered(cmd *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration) {
	now := time.Now()
	var fx lockstate.Effects
	e.mu.Lock()
	e.state().Answered(cmd, a, fail, pause, now, &fx)
	idle := e.rearmLocked(&fx)
	becameRecent := e.restAfterLocked(fx.Woken.Any())
	e.mu.Unlock()
	e.perform(&fx, idle, 0)
	if becameRecent {
		e.client.recent.add(e)
	}
}

// pause returns how long the lock leaves Redis alone after the command in flight has failed.
func (e *entry) pause() time.Duration {
	if e.awake.pauses == nil {
		policy := e.client.opts.backOff()
		if isNil(policy) {
			e.client.log.noPolicy()
			policy = defaultBackOff()
		}
		e.awake.pauses = policy
	}
	d := e.awake.pauses.NextBackOff()
	if d < 0 || d > maxRetryDelay {
		d = maxRetryDelay
	}
	return d
}

// recoverPanic, deferred, logs a panic of user code in a goroutine of the client, where
// the user could not recover it.
func (c *Client) recoverPanic(what string) {
	if p := recover(); p != nil {
		stack := string(debug.Stack())
		c.log.write(slog.LevelError, "panic", what+" panicked; locks go on", "panic", p, "stack", stack)
	}
}
