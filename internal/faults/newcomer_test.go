//go:build unix

package faults

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// Processes in a crash loop, or killed during a rollout, may never have held a lock. A waiter
// behind one of them must not have to wait until its TTL has passed.
func TestAProcessKilledWhileItWaitsForItsFirstLockIsSkipped(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	const ttl = time.Minute
	holder, next := newClient(t, rdb, prefix), newClient(t, s.Client(), prefix)
	mustUnlock(t, mustLock(t, next.Mutex("warm")))
	l := mustLock(t, holder.Mutex("x"))

	dies := spawn(t, "worker", s.Addr, prefix, ttl)
	queued(t, holder, "x", 1)
	pid := fmt.Sprintf(":%d", dies.cmd.Process.Pid)
	eventually(t, "the newcomer's inbox", func() bool {
		here := 0
		for _, channel := range rdb.PubSubChannels(t.Context(), prefix+"*").Val() {
			if strings.HasSuffix(channel, pid) {
				here++
			}
		}
		return here == 1
	})
	// Its first request was sent before that, and nothing else tells that it has asked again.
	waiters := fmt.Sprintf("%[1]sx:{%[1]sx}:waiters", prefix)
	eventually(t, "the newcomer waits under an id by which it can be proved gone", func() bool {
		ids := rdb.ZRange(t.Context(), waiters, 0, -1).Val()
		return len(ids) == 1 && strings.Contains(ids[0], ":c:")
	})

	got := wait(within(t, patience), next.Mutex("x"))
	queued(t, holder, "x", 2)
	dies.signal(syscall.SIGKILL)
	dies.kill(rdb) // returns once the server has noticed
	mustUnlock(t, l)
	// The release itself must have made somebody the owner.
	info, err := holder.Inspect(t.Context(), "x")
	if err != nil || len(info.Owners) != 1 {
		t.Fatalf("%+v, %v", info, err)
	}
	if owner := info.Owners[0].Client; strings.HasSuffix(owner, pid) {
		t.Fatalf("the dead process owns the lock for %v", info.Owners[0].TTL)
	}
	mustUnlock(t, entered(t, got).lease)
}
