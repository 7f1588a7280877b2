package leased_test

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

// Beside foreign clients the lock is free for an instant only, and nobody tells.
func TestVirtualTheHeadOfTheQueuePollsAnewForEachForeignOwnerAndThoseBehindAtTheirPace(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const turn, span = 100 * time.Millisecond, 30 * time.Second
		owner := func(n int) {
			s.rdb.Set(context.Background(), "x", "foreign-"+strconv.Itoa(n), 10*time.Second)
		}
		owner(0)
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		looks := make([]stamps, 4)
		for i := range looks {
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &looks[i] }))
			all.Go(func() {
				if l, err := c.Mutex("x").LockContext(ctx); err == nil {
					t.Error("it entered beside a foreign owner")
					unlock(t, l)
				}
			})
			synctest.Wait()
		}
		time.Sleep(5 * time.Second) // one owner for long: all look seldom
		began := time.Now()
		for n := range int(span / turn) {
			owner(n + 1)
			time.Sleep(turn)
		}
		synctest.Wait()
		for i := range looks {
			// The head sees the first change at the pace it has then.
			first, last := began.Add(3*time.Second), time.Time{}
			var worst, best time.Duration = 0, span
			for _, at := range looks[i].all() {
				if at.Before(first) {
					continue
				}
				if !last.IsZero() {
					worst, best = max(worst, at.Sub(last)), min(best, at.Sub(last))
				}
				last = at
			}
			switch {
			case i == 0 && (worst > turn || last.IsZero()):
				t.Errorf("the head did not look for %v", worst)
			case i > 0 && (best < 2*time.Second || worst > 3*time.Second):
				t.Errorf("number %d looked after %v to %v", i, best, worst)
			}
		}
		cancel()
		all.Wait()
	})
}
