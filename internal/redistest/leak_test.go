package redistest

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

// inSpy runs f under CheckLeaks in a goroutine of its own, which receives the label, and
// returns the leaks that are still there after the given time.
func inSpy(t *testing.T, rdb redis.UniversalClient, prefix string, within time.Duration, lasting []string, f func()) string {
	t.Helper()
	tb := &spy{TB: t, name: t.Name()}
	var wait sync.WaitGroup
	wait.Go(func() {
		checkLeaks(tb, within, rdb, prefix, lasting)
		f()
		tb.finish()
	})
	wait.Wait()
	return strings.Join(tb.said, "\n")
}

func TestCheckLeaksFindsWhatIsLeftBehind(t *testing.T) {
	t.Parallel()
	OnBoth(t, func(t *testing.T, s Target) {
		rdb, ctx := s.NewClient(t), t.Context()
		stop := make(chan struct{})
		defer close(stop)
		sub := rdb.Subscribe(ctx)
		defer sub.Close()
		said := inSpy(t, rdb, s.Prefix, 50*time.Millisecond, []string{s.Prefix + "allowed"}, func() {
			go func() { <-stop }()
			rdb.Set(ctx, s.Prefix+"for-ever", 1, 0)
			rdb.Set(ctx, s.Prefix+"allowed", 1, 0)
			rdb.Set(ctx, s.Prefix+"passing", 1, time.Minute)
			if err := sub.Subscribe(ctx, s.Prefix+"inbox"); err != nil {
				t.Error(err)
			}
		})
		for _, want := range []string{"goroutines left behind", s.Prefix + "for-ever", s.Prefix + "inbox"} {
			if !strings.Contains(said, want) {
				t.Errorf("%q is missing in:\n%s", want, said)
			}
		}
		for _, not := range []string{"allowed", "passing"} {
			if strings.Contains(said, s.Prefix+not) {
				t.Errorf("%q is in:\n%s", not, said)
			}
		}
		rdb.Del(ctx, s.Prefix+"for-ever", s.Prefix+"allowed")
	})
}

func TestCheckLeaksWaitsForASubscriptionThatIsAboutToGo(t *testing.T) {
	t.Parallel()
	OnBoth(t, func(t *testing.T, s Target) {
		rdb, ctx := s.NewClient(t), t.Context()
		said := inSpy(t, rdb, s.Prefix, leakWithin, nil, func() {
			sub := rdb.Subscribe(ctx, s.Prefix+"inbox")
			if _, err := sub.Receive(ctx); err != nil {
				t.Error(err)
			}
			_ = sub.Close()
		})
		if said != "" {
			t.Error(said)
		}
	})
}

func TestCheckLeaksWaitsForAGoroutineThatIsAboutToGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		said := inSpy(t, nil, "", leakWithin, nil, func() {
			go func() { time.Sleep(time.Second) }()
		})
		if took := time.Since(began); said != "" || took < time.Second {
			t.Errorf("CheckLeaks took %v and reported %q, want at least 1s and nothing", took, said)
		}
	})
}

func TestCheckLeaksDoesNotBlameOtherTests(t *testing.T) {
	stop, running := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(stop) }) // after CheckLeaks has looked
	go func() {                       // ended by the cleanup, waited for by nobody
		close(running)
		<-stop
	}()
	<-running
	CheckLeaks(t, nil, "")
}
