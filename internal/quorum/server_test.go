package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

func TestTheTimerOfALockThatWasForgottenBeforeDoesNotForgetTheLockInUse(t *testing.T) {
	s := New(Options{})
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	old := s.begin(&k)
	s.endLocked(old, &Effects{})
	h := s.begin(&k)
	if h == old {
		t.Fatal("a lock that is idle is not forgotten")
	}
	h.request("a request")
	s.endLocked(h, &Effects{})
	s.fire(old)
	s.step(&k, func(l *Lock, _ time.Time, _ *Effects) {
		if l != h.Lock {
			t.Error("the lock is forgotten")
		}
	})
}
