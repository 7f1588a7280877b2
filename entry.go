package leased

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// entry is one lock in use.
type entry struct {
	client *Client
	keys   keys
	alarm  alarm
	pauses BackOff // touched only by the command in flight
	warned bool    // likewise: that the owner will not tell us

	mu     sync.Mutex // guards what follows, and alarm.due
	lock   lock
	dead   bool // taken out of the table
	sought bool // somebody waited for who is inside, after the last step
}

// step gives the lock an event and performs what follows from it.
func (e *entry) step(event func(now time.Time, fx *effects)) {
	now := time.Now()
	var fx effects
	e.mu.Lock()
	event(now, &fx)
	spent := e.settledLocked()
	e.mu.Unlock()
	e.perform(&fx, spent, 0)
}

// settledLocked sets the alarm that the lock's state asks for and reports
// whether the entry can be forgotten.
func (e *entry) settledLocked() (spent bool) {
	e.showAllLocked()
	// An alarm that comes too early costs one look; moving it costs as much.
	due := e.lock.due()
	if at := e.alarm.due; !due.IsZero() && (at.IsZero() || due.Before(at)) {
		e.client.dog.set(&e.alarm, due)
	}
	return e.lock.idle()
}

// perform does what a step decided. Nothing is locked, and no code of the user's is
// called but that of a command which the caller sends in its own goroutine: watchdog,
// inbox and renewals perform steps too, and nothing may hold them up. A caller who would wait
// for the command's answer anyway may lend its goroutine for so long: switching
// to another costs as much as the command.
func (e *entry) perform(fx *effects, spent bool, lent time.Duration) {
	c := e.client
	for w := fx.woken; w != nil; {
		next := w.then
		w.then = nil
		if w.entered {
			c.stats.admitted(w.via)
		}
		if w.ready != nil {
			close(w.ready)
		}
		w = next
	}
	for _, l := range fx.ended {
		e.end(l)
	}
	e.finish(fx, spent, lent)
}

// finish is the part of perform that may send a command.
func (e *entry) finish(fx *effects, spent bool, lent time.Duration) {
	for _, g := range fx.gone {
		close(g.gone)
	}
	for _, done := range fx.done {
		close(done)
	}
	for i := range fx.ghosts {
		g := fx.ghosts[i]
		for each := &g; each != nil; each = each.then {
			each.keys, each.entry = &e.keys, e
		}
		e.client.reaper.add(&g)
	}
	if fx.send.verb != nothing {
		e.dispatch(fx.send, lent)
	} else if spent {
		e.client.retire(e)
	}
}

// dispatch has a command sent, in the caller's goroutine if that was lent, in
// one of its own otherwise.
func (e *entry) dispatch(cmd command, lent time.Duration) {
	c := e.client
	var sending bool
	if lent > 0 && c.server.prompt() {
		if sending = c.crew.enter(); sending {
			defer c.crew.leave()
			e.run(&cmd, min(lent, commandTimeout))
		}
	} else {
		sending = c.crew.start(func() {
			defer c.survive("a hook of the Redis client or the back-off policy")
			e.run(&cmd, commandTimeout)
		})
	}
	if !sending {
		e.answered(&cmd, answer{}, &failure{ErrClosed, noAnswer}, maxRetryDelay)
	}
}

// survive, deferred, reports a panic of the user's code in a goroutine of the
// client's: nobody else could recover it.
func (c *Client) survive(what string) {
	if p := recover(); p != nil {
		stack := string(debug.Stack())
		c.journal.write(slog.LevelError, "panic", what+" panicked; locks go on", "panic", p, "stack", stack)
	}
}

// run sends a command and gives the lock the answer. It is a sender: owned by
// the client, ended by the answer or the command's time-out, waited for by Close.
//
// It calls code of the user's: hooks of the Redis client, the back-off policy. If
// that panics in a goroutine that a caller lent, and is recovered there, or in one of
// the client's, the lock goes on as after a command without answer.
func (e *entry) run(cmd *command, limit time.Duration) {
	c := e.client
	ctx, stop := context.WithTimeout(c.base, limit)
	defer stop()
	told := false
	defer func() {
		if !told {
			e.answered(cmd, answer{}, &failure{errPanicked, noAnswer}, time.Second)
		}
	}()
	if cmd.check {
		cmd.echo = c.inbox.challenge(cmd.at, echoWait)
	}
	a, err := c.server.do(ctx, &e.keys, cmd)
	if cmd.echo != "" {
		receivers := noEcho
		if err == nil && a.outcome == enqueued {
			receivers = a.echo
		}
		c.inbox.challenged(cmd.echo, receivers)
	}
	fail := classify(err) // here, where nothing is locked
	var pause time.Duration
	if fail != nil {
		pause = e.pause()
		c.inbox.suspect(fail)
		c.outage.failed(fail)
		c.journal.trouble(e.keys.name, err)
	} else {
		c.outage.answered(e.pauses != nil)
		e.pauses = nil
		if a.mute && !e.warned {
			e.warned = true
			c.journal.mute(e.keys.name, a.blocker, a.left)
		}
		if a.echo == echoDenied {
			c.journal.denied()
		}
		c.stats.handed(a.handed)
	}
	told = true
	e.answered(cmd, a, fail, pause)
}

var errPanicked = errors.New("leased: what a command called panicked")

func (e *entry) answered(cmd *command, a answer, fail *failure, pause time.Duration) {
	e.step(func(now time.Time, fx *effects) { e.lock.answered(cmd, a, fail, pause, now, fx) })
}

// pause is how long to leave Redis alone after a failure.
func (e *entry) pause() time.Duration {
	if e.pauses == nil {
		if e.pauses = e.client.opts.backOff(); isNil(e.pauses) {
			e.client.journal.noPolicy()
			e.pauses = defaultBackOff()
		}
	}
	d := e.pauses.NextBackOff()
	if d < 0 || d > maxRetryDelay {
		d = maxRetryDelay
	}
	return d
}

// ring is the alarm's call.
func (e *entry) ring(now time.Time, batch []renewal) []renewal {
	var fx effects
	e.mu.Lock()
	if e.dead {
		e.mu.Unlock()
		return batch
	}
	e.client.dog.remove(&e.alarm) // it rang, but may be set again already
	e.lock.tick(now, &fx)
	if fx.renew {
		batch = append(batch, renewal{entry: e, req: e.lock.grant.req, at: now, touch: fx.touch})
	}
	spent := e.settledLocked()
	e.mu.Unlock()
	e.perform(&fx, spent, 0)
	return batch
}

// end tells of a lease that ended before its Unlock: its context first, and then, in
// goroutines that nobody waits for, the user's code.
func (e *entry) end(l loss) {
	lost, cause := l.why != "", ErrLeaseLost // the caller's state may say more: of a later step
	if !lost {
		cause = ErrClosed
	}
	e.mu.Lock()
	cancel, token := l.caller.cancel, l.caller.token
	var held released
	var first bool
	if lost {
		how := holdLost
		if l.why == evicted {
			how = holdForced
		}
		held, first = e.closedLocked(l.caller, how, time.Now())
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
	if !c.losses.add(LossEvent{Name: e.keys.name, Token: token, Reason: l.why}) {
		c.journal.untold()
	}
	if first {
		c.tracing.later(func() { c.left(&held) })
	}
}
