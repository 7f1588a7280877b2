package lockstate

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// strayReader returns a lock with a reader inside whose grant was lost, another
// reader inside on a new grant, and a writer of the same process who waits.
func strayReader(t *testing.T) (h *hand, stray, member, waits *Caller) {
	t.Helper()
	stray, member, waits = reader(), reader(), writer()
	h = holding(t, stray)
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.l.grant.token)
	h.lost(stray)
	h.enter(member)
	h.sends(protocol.Acquire)
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
		if h.flight.Verb == protocol.Release {
			h.answer(protocol.Answer{Outcome: protocol.Done})
		} else {
			h.answer(h.grant())
		}
	}
	if sent > 1 {
		t.Fatalf("%d commands in no time, while the lost reader has not unlocked", sent)
	}
	h.out(waits)
	h.leave(stray)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(waits)
}

func TestAWriterBehindALostReaderDoesNotSpinTheWatchdog(t *testing.T) {
	h, _, member, _ := strayReader(t)
	h.leave(member)
	if h.flight.Verb == protocol.Release {
		h.answer(protocol.Answer{Outcome: protocol.Done})
	} else {
		h.answer(h.queue())
	}
	h.pass(time.Minute) // fails if a tick changes nothing and the next is due at once
	h.sendsNothing()
}

func TestATryBesideALostReaderAsksForTheLock(t *testing.T) {
	stray, tries := reader(), reader()
	tries.Try = true
	h := holding(t, stray)
	h.hears(protocol.MessageRevoked, h.l.grant.req.ID, h.l.grant.token)
	h.lost(stray)
	h.enter(tries)
	h.sends(protocol.Acquire)
	h.answer(h.grant())
	h.in(tries)
}
