package leased

import (
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

// One lock in use, and how its state machine runs: an event enters under the entry's mutex, and its
// effects are performed after the mutex is unlocked. The order of this file is the same: step,
// perform, run, and answered, which is the next step.
//
// An entry has two kinds of goroutine: the sender of a command, started by dispatch, and that of a
// check's renewal, started by sendCheck. Both are owned by the client, ended by the reply or the
// command's timeout, and waited for by Shutdown. A caller who would wait for a command's reply
// anyway runs the command in its own goroutine instead.

// entry is one lock in use.
type entry struct {
	alarm
	client *Client
	keys   protocol.Keys
	label  *string // its label in metrics; nil: it has none

	mu sync.Mutex // guards what follows, and alarm.due; for its order see Client.mu
	// awake is nil while the lock rests. Read it only after state in the same critical section, or to ask
	// whether the lock rests. The goroutine of the command in flight may read it without mu, because that
	// command keeps the lock awake.
	awake   *awake
	resting lockstate.Resting
	dead    bool // removed from the table; find makes another entry
	recent  bool // among the client's recent locks, or about to be
}

// A client may hold very many locks, and for most of them nobody waits. Such a lock rests between
// two steps: it keeps what it needs in a smaller form, and leaves its large state machine to other
// locks.

// awake is what a lock has only while it does not rest.
type awake struct {
	lock      lockstate.Lock
	contended bool // whether callers or other processes waited for the holders after the last step

	// spare is for the next reenter; nil if there is none. Once a call that entered by reenter has
	// left by leaveKept, nothing refers to it: its goroutine has not looked at it since it entered,
	// it was in no effect, and everything else that looks at callers finds them in the lock.
	spare *call

	// These belong to the command in flight or, while there is none, to the holder of the
	// entry's mutex.
	warned        bool    // whether the warning about a foreign owner was logged
	needsOperator bool    // whether the last command failed for a reason that only an operator can remove
	pauses        BackOff // nil unless the last command failed
}

// idleStates holds state machines that no lock uses.
var idleStates = sync.Pool{New: func() any { return new(awake) }}

// stateLocked returns the lock's state machine, after waking the lock if it rests. The state machine may
// be used only under e.mu, and only until restLocked.
func (e *entry) stateLocked() *lockstate.Lock {
	if e.awake == nil {
		e.awake = idleStates.Get().(*awake)
		e.awake.lock.Wake(&e.resting, (*environment)(e.client))
	}
	return &e.awake.lock
}

// restLocked lets the lock rest, if it can. It is called after an event of Redis, an alarm, or an
// inspection of the lock, and after a Check, a Downgrade or a wait that was given up. It is not called
// after Enter or Unlock, because other callers come next. A step that can let a caller in ends with
// restAfterLocked instead, because that caller's Unlock comes next, see recentLocks; fire and retry, which
// rarely do, do not tell the two apart.
func (e *entry) restLocked() {
	if e.awake == nil || e.awake.lock.CommandInFlight() { // pauses belongs to that command
		return
	}
	if e.awake.pauses == nil && e.awake.lock.Rest(&e.resting) {
		e.sleepLocked()
	}
}

// restAfterLocked ends a step: the lock rests, unless a caller's wait has ended. It returns true if
// the lock has to be added to the recent ones once e.mu is unlocked.
func (e *entry) restAfterLocked(ended bool) (becameRecent bool) {
	if !ended {
		e.restLocked()
		return false
	}
	becameRecent, e.recent = !e.recent, true
	return becameRecent
}

// recentLocks are the locks that let callers in most recently. A lock that lets a caller in does
// not rest until other locks have taken its place here: most leases are short, and putting the
// state machine away and getting it out again costs a tenth of what this package does for a lease.
// A client that holds very many locks has few of them here.
type recentLocks struct {
	places [64]atomic.Pointer[entry]
	next   atomic.Uint32
}

// add adds e, whose recent field has been set, and lets the lock rest whose place e takes. The
// calling goroutine holds the mutex of no entry.
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

// sleepLocked leaves the state machine to another lock.
func (e *entry) sleepLocked() {
	*e.awake = awake{}
	idleStates.Put(e.awake)
	e.awake = nil
}

// step gives the lock an event and performs its effects.
func (e *entry) step(event func(now time.Time, fx *lockstate.Effects)) {
	now := time.Now()
	var fx lockstate.Effects
	e.mu.Lock()
	event(now, &fx)
	e.endStepLocked(&fx)
}

// endStepLocked ends a step that was begun under e.mu: it unlocks e.mu and performs the effects.
func (e *entry) endStepLocked(fx *lockstate.Effects) {
	idle := e.rearmLocked(fx)
	becameRecent := e.restAfterLocked(fx.Woken.Any())
	e.mu.Unlock()
	e.perform(fx, idle, 0)
	if becameRecent {
		e.client.recent.add(e)
	}
}

// rearmLocked ends every step. It notes the requests that are to be canceled, and the span under which the
// lock's command is to be sent, sets the alarm that the lock's state asks for, and reports whether the lock
// is idle, so that the entry can be removed.
func (e *entry) rearmLocked(fx *lockstate.Effects) (idle bool) {
	e.traceHoldersLocked()
	if fx.Send.Verb != protocol.None {
		if c := e.stateLocked().Served(); c != nil && callOf(c).under() != nil {
			fx.Send.Under = callOf(c).under()
		}
	}
	for i := range fx.Cancels {
		cancel := fx.Cancels[i] // a copy that outlives fx
		for each := &cancel; each != nil; each = each.Then {
			each.Owner = e
		}
		e.client.canceler.note(&cancel)
	}
	e.setAlarmLocked()
	return e.stateLocked().Idle()
}

// setAlarmLocked sets the alarm that the lock's state asks for. An alarm that is too early stays:
// it costs one look at the lock, and moving it costs as much.
func (e *entry) setAlarmLocked() {
	due := e.stateLocked().Due()
	if at := e.due; due != 0 && (at == 0 || due < at) {
		e.client.watchdog.setInstant(e, due)
	}
}

// fire takes the step that the entry's alarm causes, and adds to batch the renewal that the lock
// asks for.
func (e *entry) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	var fx lockstate.Effects
	e.mu.Lock()
	if e.dead {
		e.mu.Unlock()
		return batch
	}
	e.client.watchdog.remove(&e.alarm) // it fired, but may be set again already
	e.stateLocked().Tick(now, &fx)
	if fx.Renew {
		batch = append(batch, protocol.Renewal{Owner: e, Keys: &e.keys, Req: e.stateLocked().Request(), At: now, Spare: fx.Spare, Touch: fx.Touch})
	}
	idle := e.rearmLocked(&fx)
	e.restLocked()
	e.mu.Unlock()
	e.perform(&fx, idle, 0)
	return batch
}

// perform does what a step decided, after e.mu was unlocked. (It does not send renewals that nobody
// waits for: they leave in the watchdog's batch, see fire.) The effects are performed in this
// order:
//
//  1. Woken: callers that were admitted or rejected return from their wait. This comes first
//     because it is a hand-off inside the process, which everything else would delay.
//  2. Ended: the losses of leases that ended before their Unlock are recorded, and their contexts
//     end. This comes before 3, so that by the time an Unlock or a Downgrade returns the loss, the
//     context has ended, the loss is counted, and the hold is recorded with its reason.
//  3. Gone and Done: an Unlock, a Downgrade or a Check that was waiting returns.
//  4. Cancels: the canceler, which has noted them, starts.
//  5. Check: a renewal that a caller waits for is sent, on a goroutine of the client.
//  6. Send: the lock's next command is sent. This comes last because the command may run here, for
//     as long as inlineFor; if that is zero, it runs in a new goroutine. A caller who would wait
//     for the reply anyway runs the command here, because switching to another goroutine costs as
//     much as the command.
//  7. If there is nothing to send, an idle entry is removed from the table, unless it is no longer
//     idle.
//
// Several goroutines may perform steps of one lock at once, and a later step may overtake an
// earlier one. So effects of different steps do not depend on each other, except that a command is
// sent only after the reply to the previous command was itself a step. Cancels do depend on each other, and
// on the removal of the entry, so they are noted in the step (see canceler.note).
//
// perform holds no mutex, and calls no user code except through a command that runs here: the
// watchdog, the inbox and renewals perform steps too, and nothing may hold them up.
func (e *entry) perform(fx *lockstate.Effects, idle bool, inlineFor time.Duration) {
	for w := range fx.Woken.All {
		if w.Entered {
			e.client.stats.countAdmission(w.Via)
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
	if len(fx.Cancels) > 0 {
		e.client.canceler.start()
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

// sendCheck sends a renewal that a caller waits for. If the client is closed, nothing is sent, and
// the caller stops waiting because of that.
func (e *entry) sendCheck(r protocol.Renewal) {
	r.Owner, r.Keys = e, &e.keys
	e.client.group.start(func() { e.client.renew([]protocol.Renewal{r}) })
}

// end ends the contexts of a lease that ended before its Unlock. If the lease was lost, end also
// counts and records the loss. The loss handler and OpenTelemetry, which are user code, are called
// in goroutines that nothing else depends on.
func (e *entry) end(loss lockstate.Loss) {
	lost, cause := loss.Why != 0, ErrClosed // Caller.Ended may come from a later step
	e.mu.Lock()
	w := callOf(loss.Caller)
	contexts, token, ttl := w.extras().contexts, w.Token, w.Opts.TTL
	var held holdRecord
	var first bool
	if lost {
		cause = e.lostLocked(w, nil)
		held, first = e.takeHoldLocked(w, holdEnd{how: holdOutcome(w, nil), at: time.Now()})
	}
	e.mu.Unlock()
	contexts.end(cause)
	if !lost {
		return
	}
	c := e.client
	c.stats.lost.Add(1)
	if !c.losses.add(LossEvent{Name: e.keys.Name(), Token: token, Reason: loss.Why.String(), Err: cause, TTL: ttl}) {
		c.log.lossesDropped()
	}
	if first {
		c.tracing.later(func() { c.recordHold(&held) })
	}
}

// dispatch runs a command: in the caller's goroutine if inlineFor is positive, otherwise in a
// goroutine of the client. A command that does not honor deadlines could hold its caller for longer
// than inlineFor, so it never runs inline.
func (e *entry) dispatch(what protocol.Command, inlineFor time.Duration) {
	c := e.client
	var sending bool
	cmd := commands.Get().(*protocol.Command)
	*cmd = what
	if inlineFor > 0 && c.server.HonorsDeadlines() {
		sending = c.group.add()
		if sending {
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

// commands holds commands for dispatch to reuse. Nothing refers to a command that was answered:
// servers copy what they keep of it.
var commands = sync.Pool{New: func() any { return new(protocol.Command) }}

// run sends a command and gives the lock the reply.
//
// run calls user code: hooks of the Redis client and the back-off policy. If that code panics, the
// lock continues as after a command without a reply, and the panic goes on: in the caller's
// goroutine it is the caller's, and in one of the client's it is logged.
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
			e.answered(cmd, protocol.Answer{}, &protocol.Failure{Err: protocol.ErrPanicked, Kind: protocol.NoAnswer}, time.Second)
		}
	}()
	if cmd.Cooldown > 0 {
		c.canceler.released(cmd.ID, cmd.Cooldown, time.Now())
	}
	if cmd.Recheck {
		cmd.Echo = c.alone.startProbe(cmd.At, lockstate.Silence(cmd.Place))
	}
	c.slotMap.await(ctx)
	began := c.metrics.startTiming(ctx)
	a, err := c.server.Do(ctx, &e.keys, cmd)
	took := began.elapsed()
	if cmd.Echo != "" {
		c.alone.probeSent(cmd.Echo, a.Published(cmd))
	}
	fail := redisserver.Classify(err) // here, where no mutex is held: it calls methods of the error
	var pause time.Duration
	var failed time.Time
	if fail != nil {
		failed = time.Now()
		pause = e.noteFailure(cmd, fail)
	} else {
		e.noteReply(cmd, &a)
	}
	returned = true
	c.slotMap.commandFailed(fail) // before the step, whose commands are to find the right node
	e.answered(cmd, a, fail, pause)
	c.metrics.recordCommand(ctx, commandOf(cmd.Verb), took, fail)
	if fail != nil && !fail.Again {
		// After the step: the outage ends when a probe finds no lock that waits out a pause,
		// and a probe in between would not find this one.
		c.outage.failed(fail, failed)
	}
	*cmd = protocol.Command{}
	commands.Put(cmd)
}

// noteFailure notes what the failure of a command says of the client and of Redis, and returns how long
// the lock sends nothing.
func (e *entry) noteFailure(cmd *protocol.Command, fail *protocol.Failure) (pause time.Duration) {
	c := e.client
	first := e.awake.pauses == nil
	// Repeat it at once, but only once. While its slot moves, repeat it after a pause until the map of the slots is new.
	fail.Again = fail.Again && (first || fail.Moved && !cmd.Question && c.slotMap.moves(e.keys.Lock, movingTime, time.Now()))
	hadFailed := !first && !e.awake.needsOperator
	pause = e.pause()
	if e.awake.needsOperator = fail.Lasts(); e.awake.needsOperator && hadFailed {
		c.outage.answered(true) // an error that an operator has to remove is an answer, too
	}
	c.alone.requireProbe(fail)
	switch {
	case fail.Again && first:
		return 0
	case fail.Again:
		return pause
	}
	c.logFailure(e.keys.Name(), fail)
	c.downtime.commandFailed(fail, cmd.At, kindOfCommand(cmd, nil))
	return pause
}

// noteReply notes what the reply to a command says of the client and of Redis.
func (e *entry) noteReply(cmd *protocol.Command, a *protocol.Answer) {
	c := e.client
	c.downtime.commandAnswered(kindOfCommand(cmd, a))
	c.outage.answered(e.awake.pauses != nil) // it is awake, with a command in flight
	e.awake.pauses, e.awake.needsOperator = nil, false
	if a.NoNotify && !e.awake.warned {
		e.awake.warned = true
		c.log.foreignOwner(e.keys.Name(), a.Blocker, a.Left)
	}
	c.alone.published(a.Published(cmd))
	c.alone.askAgain(&e.keys)
	c.stats.countHandoffs(a.Handed)
}

// answered is the step that ends a command; fail is nil if there was a reply. It does not use step,
// because the effects of a step whose event is a function value go to the heap.
func (e *entry) answered(cmd *protocol.Command, a protocol.Answer, fail *protocol.Failure, pause time.Duration) {
	now := time.Now()
	if fail == nil {
		e.client.roundTrip.Took(now.Sub(cmd.At))
	}
	var fx lockstate.Effects
	e.mu.Lock()
	e.stateLocked().Answered(cmd, a, fail, pause, now, &fx)
	e.endStepLocked(&fx)
}

// pause returns how long the lock sends nothing to Redis after the command in flight has failed.
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
	return max(d, minRetryDelay)
}

// recoverPanic is deferred. It logs a panic of user code in a goroutine of the client, where the
// user could not recover it.
func (c *Client) recoverPanic(what string) {
	if p := recover(); p != nil {
		c.logPanic(what, p)
	}
}

// logPanic is called where the stack still shows what panicked. The value may name a command's keys.
func (c *Client) logPanic(what string, with any) {
	if c.opts.hideNames {
		with = onlyType(with)
	}
	c.log.write(slog.LevelError, "panic", what+" panicked; locks go on", "panic", with, "stack", string(debug.Stack()))
}
