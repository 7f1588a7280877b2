package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// All five servers answer a re-check with the grant, as at the end of a cool-down, but some ms apart, and
// the first grants are given back meanwhile because others wait behind them. The request still waits.
func TestARequestKeepsItsPlaceWhenItsGrantsAreGivenBackBeforeTheLastServerAnswers(t *testing.T) {
	s := newStand(t, 5, time.Second)
	first := s.acquire()
	for _, send := range s.fx.Sends {
		s.answer(send, Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
	}
	if !first.Decided() || first.Err != nil {
		t.Fatalf("%+v %v", first.Answer, first.Err)
	}
	s.now = s.now.Add(200 * time.Millisecond)
	op := s.acquire()
	sends := s.fx.Sends
	yes := granted(7)
	yes.Answer.More = true // others wait behind it
	tick := func() {
		s.now = s.now.Add(3 * time.Millisecond)
		s.fx = Effects{}
		s.lock.Tick(s.now, &s.fx)
	}
	cancels := 0
	take := func(i int) {
		for _, more := range s.answer(sends[i], yes) {
			if more.Kind == Cancel {
				cancels++
			}
		}
	}
	take(0)
	take(1)
	tick()
	take(2)
	tick()
	take(3)
	take(4)
	if !op.Decided() || op.Err != nil || cancels > 0 {
		t.Errorf("all servers have answered: decided %v, %v, and %d cancels", op.Decided(), op.Err, cancels)
	}
}
