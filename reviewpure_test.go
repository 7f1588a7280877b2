package leased

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// What a review found in the state machine.

// strayReader returns a lock with a reader inside whose grant was lost, another
// reader inside on a new grant, and a writer of the same process who waits.
func strayReader(t *testing.T) (h *hand, stray, member, waits *caller) {
	t.Helper()
	stray, member, waits = reader(), reader(), writer()
	h = holding(t, stray)
	h.hears("revoked", h.l.grant.req.id, h.l.grant.token)
	h.lost(stray)
	h.enter(member)
	h.sends(acquire)
	h.answer(h.grant())
	h.in(member)
	h.enter(waits)
	h.out(waits)
	return h, stray, member, waits
}

func TestAWriterBehindALostReaderDoesNotHaveTheLockYieldedInCircles(t *testing.T) {
	h, stray, member, waits := strayReader(t)
	h.leave(member)
	sent := 0
	for h.flight != nil && sent < 100 {
		sent++
		if h.flight.verb == release {
			h.answer(answer{outcome: done})
		} else {
			h.answer(h.grant())
		}
	}
	if sent > 1 {
		t.Fatalf("%d commands in no time, while the lost reader has not unlocked", sent)
	}
	h.out(waits)
	h.leave(stray)
	h.sends(acquire)
	h.answer(h.grant())
	h.in(waits)
}

func TestAWriterBehindALostReaderDoesNotSpinTheWatchdog(t *testing.T) {
	h, _, member, _ := strayReader(t)
	h.leave(member)
	if h.flight.verb == release {
		h.answer(answer{outcome: done})
	} else {
		h.answer(h.queue())
	}
	h.pass(time.Minute) // fails if a tick changes nothing and the next is due at once
	h.sendsNothing()
}

func TestATryIsRefusedWhereItsYieldIsQueued(t *testing.T) {
	h := drive(t)
	r := reader(func(o *lockOptions) { o.idleHold = time.Minute })
	h.enter(r)
	h.answer(h.grant())
	h.leave(r)
	h.sendsNothing() // it idles
	w := h.enter(trying(writer()))
	id := h.sends(yield).next // another's writer queues at this time
	h.answer(h.queue())
	h.turned(w, ErrLocked)
	h.cancels(id)
}

func TestARefusedTryLeavesNoRequestInTheQueue(t *testing.T) {
	h := drive(t)
	r := reader(func(o *lockOptions) { o.idleHold = time.Minute })
	h.enter(r)
	h.answer(h.grant())
	h.leave(r)
	w := h.enter(trying(writer()))
	id := h.sends(yield).next
	h.answer(h.queue()) // the yield has put it into the queue
	for range 10 {
		if h.flight != nil {
			a := h.queue()
			a.outcome = refused
			h.answer(a)
		}
		h.pass(time.Second)
	}
	h.turned(w, ErrLocked)
	h.cancels(id)
}

func TestALeaseThatIsOverIsNotTrustedForTheFuture(t *testing.T) {
	for how, end := range map[string]func(h *hand, c *caller){
		"unlocked": func(h *hand, c *caller) { h.leave(c) },
		"revoked":  func(h *hand, _ *caller) { h.hears("revoked", h.l.grant.req.id, h.l.grant.token) },
		"not ours": func(h *hand, _ *caller) {
			h.renewed(renewal{req: h.l.grant.req, at: h.now}, notOurs)
		},
		"maximum hold": func(h *hand, _ *caller) { h.pass(time.Second) },
	} {
		t.Run(how, func(t *testing.T) {
			c := writer(func(o *lockOptions) { o.maxHold = time.Second })
			h := holding(t, c)
			h.pass(time.Millisecond)
			end(h, c)
			if until := h.l.trustedUntil(c, h.now); until.After(h.now) {
				t.Errorf("trusted for %v more", until.Sub(h.now))
			}
		})
	}
}

func TestCancelledCallsDuringAnOutageLeaveNothingPiledUp(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:1", DialerRetries: 1, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
		},
	})
	defer rdb.Close()
	c, err := New(rdb, WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 1000 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		_, _ = c.Mutex("x").LockContext(ctx)
		cancel()
	}
	c.reaper.mu.Lock()
	n := len(c.reaper.schedule.pending)
	c.reaper.mu.Unlock()
	if n > 10 {
		t.Errorf("%d requests are being cancelled, each every second for a TTL; %d commands were sent", n, c.Stats().Commands)
	}
}

// The renewal was sent before the command that proved the grant since, and
// overtaken by it.
func TestAnOldRenewalsNotOursEndsNoLeaseThatWasProvedSince(t *testing.T) {
	first := writer(func(o *lockOptions) { o.idleHold = time.Minute })
	h := holding(t, first)
	h.leave(first)
	h.pass(handTTL / 3)
	old := h.renewals[0]
	h.now = h.now.Add(handTTL) // nobody rang: the process was slow
	c := h.enter(writer())
	h.sends(acquire)
	h.answer(h.grant())
	h.in(c)
	h.renewed(old, notOurs)
	h.lost()
}
