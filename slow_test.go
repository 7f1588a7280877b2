package leased

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// slow is a mirror that takes its time with renewals.
type slow struct {
	mirror
	takes   time.Duration
	renewed atomic.Int64
}

func (s *slow) renew(ctx context.Context, batch []renewal) {
	s.renewed.Add(int64(len(batch)))
	time.Sleep(s.takes)
	s.mirror.renew(ctx, batch)
}

// Answers that take just as long as the pause between renewals arrive together
// with the next alarm, before or after it.
func TestVirtualAnswersThatArriveWithTheNextAlarmDoNotCostARenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c := onMirror(t, 0, 0, WithTTL(ttl))
		s := &slow{mirror: mirror{client: c}, takes: ttl / 3}
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
