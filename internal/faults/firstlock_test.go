//go:build unix

package faults

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

func TestAProcessKilledWhileItWaitsForTheFirstLockOfItsLifeCostsItsSuccessorNothing(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	look := newClient(t, rdb, prefix)
	const ttl = time.Hour // far longer than patience
	owner := spawn(t, "worker", s.Addr, prefix, ttl)
	owner.hear("locked")
	dies := spawn(t, "worker", s.Addr, prefix, ttl)
	queued(t, look, "x", 1)
	next := spawn(t, "worker", s.Addr, prefix, ttl)
	queued(t, look, "x", 2)
	dies.kill(rdb)
	owner.tell("unlock")
	owner.hear("unlocked")
	next.hear("locked")
	next.tell("unlock")
	next.hear("unlocked")
	next.end()
	owner.end()
}
