package leased

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
)

// slow is a stub server whose renewals take long.
type slow struct {
	stubServer
	takes   time.Duration
	renewed atomic.Int64
}

func (s *slow) Renew(ctx context.Context, batch []protocol.Renewal) {
	s.renewed.Add(int64(len(batch)))
	time.Sleep(s.takes)
	s.stubServer.Renew(ctx, batch)
}

// Answers that take just as long as the pause between renewals arrive together
// with the next alarm, before or after it.
func TestVirtualAnswersThatArriveWithTheNextAlarmDoNotCostARenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c := onStub(t, 0, 0, WithTTL(ttl))
		s := &slow{stubServer: stubServer{client: c}, takes: ttl / 3}
		c.server = s
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		const periods = 1000
		time.Sleep(periods*ttl/3 + time.Millisecond)
		synctest.Wait()
		if n := s.renewed.Load(); n != periods {
			t.Errorf("%d renewals in %d periods", n, periods)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// An alarm is late by the sleep; what else the watchdog has to do has it look first.
func TestTheWatchdogLooksAtAllLocksWithinASecondOfWaking(t *testing.T) {
	now := time.Now()
	w := newWatchdog(&Client{began: now})
	var locks [3]entry
	for i := range locks {
		w.set(&locks[i], now.Add(time.Duration(i+8)*time.Hour))
	}
	another := &inbox{}
	w.set(another, now.Add(time.Hour)) // an echo is not late because the machine slept
	if due := w.take(now, nil); len(due) != 0 {
		t.Fatalf("%d alarms rang", len(due))
	}
	if next := w.plan(now).Time(w.client.began); next.Sub(now) > time.Second {
		t.Errorf("the clocks are compared after %v", next.Sub(now))
	}
	now = clocktest.Asleep(t, now, -time.Hour)
	if due := w.take(now, nil); len(due) != 0 {
		t.Errorf("%d alarms rang because the clock was set back", len(due))
	}
	now = clocktest.Asleep(t, now, time.Minute)
	if due := w.take(now, nil); len(due) != len(locks) {
		t.Errorf("%d alarms rang after a sleep", len(due))
	}
	if another.index == 0 || len(w.alarms) != 1 {
		t.Errorf("%d alarms are left", len(w.alarms))
	}
	if w.remove(&another.alarm); w.plan(now) != 0 {
		t.Error("the clocks are compared for nothing")
	}
}

// emptied is a server that owns nothing any more.
type emptied struct{ *stubServer }

func (emptied) Renew(_ context.Context, batch []protocol.Renewal) {
	for i := range batch {
		batch[i].Outcome = protocol.NotOurs
	}
}

// The release was faster on the server than a renewal that was sent before it.
func TestARenewalThatCrossesAnUnlockIsNotCountedAsLost(t *testing.T) {
	c := onStub(t, 0, 0)
	c.server = emptied{c.server.(*stubServer)}
	mu := c.Mutex("x")
	mu.Lock()
	e := c.lookup("x")
	sent := protocol.Renewal{Owner: e, Keys: &e.keys, Req: e.request(), At: time.Now()}
	mu.Unlock()
	c.renew([]protocol.Renewal{sent})
	if n := c.stats.renewals[renewalLost].Load(); n != 0 {
		t.Errorf("%d renewals counted as lost", n)
	}
}
