//go:build unix

package main

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/redistest"
)

// What happens to the clocks of a machine while the guard waits, and when it kills.
func TestTheGuardWaitsAMomentIfOnlyTheWallClockSaysThatTheLeaseEnds(t *testing.T) {
	start := reading{boot: int64(time.Hour), wall: time.Now().UnixNano()}
	after := func(boot, wall time.Duration) reading {
		return reading{start.boot + int64(boot), start.wall + int64(wall)}
	}
	const left, jump = 20 * time.Second, time.Minute
	type look struct {
		at   reading
		over bool
	}
	for what, looks := range map[string][]look{
		"nothing happens":     {{after(left, left), false}, {after(left+1, left+1), true}},
		"the machine sleeps":  {{after(0, 0), false}, {after(jump, jump), true}},
		"the wall clock back": {{after(left, -jump), false}, {after(left+1, -jump), true}},
		"the wall clock ahead, and nobody answers": {
			{after(1, jump), false}, {after(1+wallPatience, jump+wallPatience), false}, {after(2+wallPatience, jump+wallPatience), true}},
		"the wall clock ahead, shortly before the end": {{after(left, jump), false}, {after(left+1, jump), true}},
		"the wall clock ahead and back": {
			{after(1, jump), false}, {after(2, 2), false}, {after(wallPatience+2, jump), false}},
	} {
		v := vigil{until: deadline(after(left, left))}
		for i, l := range looks {
			if v.isOver(l.at) != l.over {
				t.Errorf("%s: at look %d, that the guard kills is %v", what, i+1, !l.over)
			}
		}
	}
	v := vigil{until: deadline(after(left, left))}
	v.isOver(after(1, jump))
	v.until = deadline(after(left, jump+left)) // the lease was renewed
	if v.isOver(after(wallPatience+2, jump+wallPatience)) {
		t.Error("the guard kills although it has heard of a renewal since the wall clock was set ahead")
	}
}

// The guard's clock went on while the machine slept, and what is left was computed before.
func TestADeadlineFromBeforeASleepHasPassed(t *testing.T) {
	now := time.Now()
	awake := clocktest.Asleep(t, now, time.Hour)
	clocks := reading{boot: int64(2 * time.Hour), wall: awake.UnixNano()}
	if d := deadlineAt(now.Add(20*time.Second), awake, clocks); !d.passed(clocks) {
		t.Errorf("at %v, the deadline is %v", clocks, d)
	}
	d := deadlineAt(now.Add(20*time.Second), now, clocks)
	if want := clocks.boot + int64(20*time.Second); d.boot != want {
		t.Errorf("the deadline is at %d, not at %d", d.boot, want)
	}
	if got, err := parseDeadline(d.String()); got != d || err != nil {
		t.Errorf("the guard reads %v as %v, %v", d, got, err)
	}
}

// A lease of which little is left need not be one that could not be renewed: the wall clock may have been
// set ahead. Here, renewals have failed until now instead, and Redis has just come back.
func TestBeforeTheCommandIsToldToEndRedisIsAsked(t *testing.T) {
	for what, back := range map[string]bool{"Redis answers": true, "Redis is still away": false} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				redistest.LastInBubble(t)
				m := redistest.Mini(t)
				o := &runOptions{name: "job", ttl: 30 * time.Second}
				trouble := troubleLog{warnings: make(chan string, 1), failures: make(chan error, 1)}
				client, err := leased.New(redistest.MiniClient(t, m), leased.WithTTL(o.ttl), leased.WithLogger(slog.New(&trouble)))
				if err != nil {
					t.Fatal(err)
				}
				defer client.Close()
				lease, err := client.RWMutex(o.name).LockContext(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer lease.Unlock()
				r := &running{options: o, lease: lease, guard: &guard{ended: true}, stderr: io.Discard, trouble: &trouble}
				r.prolong()
				m.SetError("LOADING Redis is loading the dataset in memory")
				for time.Until(lease.TrustedUntil()) >= termMargin(o.ttl) {
					time.Sleep(time.Millisecond)
				}
				if back {
					m.SetError("")
				}
				before := r.guard.deadline
				r.watchLease()
				switch {
				case !back && (r.lost == nil || !strings.Contains(r.lost.Error(), "told to end before the lease ends: LOADING")):
					t.Errorf("the command is told to end: %v", r.lost)
				case back && r.lost != nil:
					t.Errorf("the command is told to end: %v", r.lost)
				case back && r.guard.deadline.wall <= before.wall:
					t.Error("the guard does not hear of the renewal")
				}
				m.SetError("")
			})
		})
	}
}

func TestAGuardThatIsStoppedStopsNobodyElse(t *testing.T) {
	theirs, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	defer ours.Close()
	_ = ours.SetWriteDeadline(time.Now().Add(time.Second))
	for err == nil {
		_, err = ours.Write([]byte("x")) // until the pipe is full
	}
	g := &guard{lines: ours}
	g.until(time.Now().Add(time.Minute)) // it returns
	if g.deadline.passed(readClocks()) {
		t.Error("the deadline has passed")
	}
}

// Once the command was told to end, this process asks Redis no more.
func TestACommandThatWasToldToEndIsKilledOnceTheWallClockSaysThatItsLeaseIsOver(t *testing.T) {
	m := redistest.MiniTCP(t)
	r := &running{options: &runOptions{name: "job", ttl: time.Minute}, lease: holder(t, m.Addr(), "job", true), guard: &guard{ended: true}, stderr: io.Discard}
	r.prolong()
	r.tellToEnd(errors.New("lost"))
	if r.watchLease(); !r.killed.IsZero() {
		t.Error("the command is killed at once")
	}
	r.guard.deadline.wall -= int64(time.Hour)
	if r.watchLease(); r.killed.IsZero() {
		t.Error("the command goes on")
	}
}

// The guard has waited for this process to ask Redis, and waits no longer.
func TestACommandIsKilledAtOnceIfItsLeaseIsLostByTheWallClock(t *testing.T) {
	m := redistest.MiniTCP(t)
	for ahead, want := range map[time.Duration]time.Duration{0: termMargin(time.Minute) - killMargin(time.Minute), time.Hour: 0} {
		r := &running{options: &runOptions{name: "job", ttl: time.Minute}, lease: holder(t, m.Addr(), "job", true), guard: &guard{ended: true}, stderr: io.Discard}
		r.prolong()
		r.guard.deadline.wall -= int64(ahead)
		before := time.Now()
		r.tellToEnd(errors.New("lost"))
		if left := r.killAt.Sub(before); left < want || left > want+time.Since(before) {
			t.Errorf("with the wall clock %v ahead, the command is killed after %v", ahead, left)
		}
	}
}
