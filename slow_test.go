package leased

import (
	"context"
	"errors"
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

// distant is a mirror that takes its time with a request, and answers no downgrade.
type distant struct{ mirror }

func (d *distant) prompt() bool { return true }

func (d *distant) do(ctx context.Context, k *keys, c *command) (answer, error) {
	switch c.verb {
	case acquire:
		time.Sleep(500 * time.Millisecond)
	case downgrade:
		return answer{}, errSilence
	}
	return d.mirror.do(ctx, k, c)
}

// When somebody leaves after a loss, or after a downgrade without answer, no release
// is sent; but the next may ask, which had to wait for that.
func TestVirtualWhoLeavesDoesNotWaitForWhatTheNextAsks(t *testing.T) {
	for what, c := range map[string]struct {
		end  func(d *distant, l *Lease)
		want error
	}{
		"after a loss": {func(d *distant, l *Lease) {
			d.tell(&message{kind: "revoked", id: l.entry.lock.grant.req.id, key: "x", token: l.Token()})
		}, ErrLeaseLost},
		"after a downgrade without answer": {func(_ *distant, l *Lease) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			_ = l.Downgrade(ctx)
		}, nil},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := onMirror(t, 0, 0)
				d := &distant{mirror{client: client}}
				client.server = d
				rw := client.RWMutex("x")
				first, err := rw.LockContext(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				c.end(d, first)
				done := make(chan struct{})
				go func() { // ended by the lock, waited for through done
					defer close(done)
					rw.Lock()
					rw.Unlock() //nolint:staticcheck // it had to be let in, no more
				}()
				synctest.Wait()
				began := time.Now()
				if err := first.Unlock(); !errors.Is(err, c.want) {
					t.Errorf("Unlock: %v", err)
				}
				if took := time.Since(began); took != 0 {
					t.Errorf("Unlock took %v", took)
				}
				<-done
			})
		})
	}
}
