package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Close, as the lock sees it.

func TestCloseInEachState(t *testing.T) {
	t.Run("none", func(t *testing.T) {
		h := drive(t)
		h.close()
		h.turned(h.enter(writer()), protocol.ErrClosed)
		h.sendsNothing()
	})
	t.Run("asking", func(t *testing.T) {
		h := drive(t)
		c := h.enter(writer())
		h.close()
		h.turned(c, protocol.ErrClosed)
		h.answer(h.grant())
		h.sends(protocol.Release)
	})
	t.Run("queued", func(t *testing.T) {
		c := writer()
		h, req := queueing(t, c)
		h.close()
		h.turned(c, protocol.ErrClosed)
		h.cancels(req.ID)
		h.sendsNothing()
	})
	t.Run("held", func(t *testing.T) {
		a, b := writer(), writer()
		h := holding(t, a).keep()
		h.enter(b)
		h.close()
		h.turned(b, protocol.ErrClosed)
		if len(h.losses) != 1 || h.losses[0].Caller != a || a.Ended != byClose {
			t.Errorf("told of %+v", h.losses)
		}
		h.pass(time.Minute)
		if len(h.renewals) < 17 {
			t.Errorf("renewed %d times for one inside", len(h.renewals))
		}
		h.leave(a)
		h.sends(protocol.Release)
		h.answer(protocol.Answer{Outcome: protocol.Done})
		h.settled(a, nil)
	})
	t.Run("idle", func(t *testing.T) {
		c := writer(func(o *Terms) { o.IdleHold = time.Hour })
		h := holding(t, c)
		h.leave(c)
		h.sendsNothing()
		h.close()
		h.sends(protocol.Release)
	})
	t.Run("yielding", func(t *testing.T) {
		h, a, b, _ := yielding(t)
		h.close()
		h.turned(b, protocol.ErrClosed)
		h.answer(h.grant())
		h.sends(protocol.Release)
		h.settled(a, nil)
	})
	t.Run("twice", func(t *testing.T) {
		h := holding(t, writer())
		h.close()
		h.close()
		if len(h.losses) != 1 {
			t.Errorf("told of %+v", h.losses)
		}
	})
}

func TestALeaseIsTrustedForAsLongAsItIsRenewedWhileItsClientCloses(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.close()
	if got := h.l.TrustedUntil(c, h.now).Sub(noon); got != handWindow {
		t.Errorf("trusted until %v, want %v", h.l.TrustedUntil(c, h.now), handWindow)
	}
	h.leave(c)
	if got := h.l.TrustedUntil(c, h.now); got.After(h.now) {
		t.Errorf("after Unlock it is trusted until %v", got)
	}
}

// The client's ticks may have ended, so the give-back is what finds that the time is over.
func TestALeaseThatNobodyTookIsNoLossAfterClose(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.close()
	h.losses = nil
	h.now = h.now.Add(2 * handTTL)
	h.step(func(now time.Time, fx *Effects) { h.l.GiveBack(c, now, fx) })
	for _, loss := range h.losses {
		t.Errorf("it is reported as lost: %v", loss.Why)
	}
}

func TestAnUnlockAfterCloseSaysThatTheLeaseHadBeenLost(t *testing.T) {
	c := writer()
	h := holding(t, c)
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.top)
	h.close()
	h.lost(c)
	h.leave(c)
	h.settled(c, ErrLeaseLost)
}
