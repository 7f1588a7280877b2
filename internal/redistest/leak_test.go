package redistest

import (
	"strings"
	"sync"
	"testing"
	"time"
)

// inSpy runs f under CheckLeaks in a goroutine of its own, whose label it gets, and
// returns what was found within a time.
func inSpy(t *testing.T, s Target, within time.Duration, lasting []string, f func(prefix string)) string {
	t.Helper()
	tb := &spy{TB: t, name: t.Name()}
	rdb := s.NewClient(t)
	var wait sync.WaitGroup
	wait.Go(func() {
		checkLeaks(tb, within, rdb, s.Prefix, lasting)
		f(s.Prefix)
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
		said := inSpy(t, s, 50*time.Millisecond, []string{s.Prefix + "allowed"}, func(prefix string) {
			go func() { <-stop }()
			rdb.Set(ctx, prefix+"for-ever", 1, 0)
			rdb.Set(ctx, prefix+"allowed", 1, 0)
			rdb.Set(ctx, prefix+"passing", 1, time.Minute)
			if err := sub.Subscribe(ctx, prefix+"inbox"); err != nil {
				t.Error(err)
			}
		})
		for _, want := range []string{"TestCheckLeaksFindsWhatIsLeftBehind", s.Prefix + "for-ever", s.Prefix + "inbox"} {
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

func TestCheckLeaksWaitsForWhatIsAboutToGo(t *testing.T) {
	t.Parallel()
	OnBoth(t, func(t *testing.T, s Target) {
		rdb, ctx := s.NewClient(t), t.Context()
		said := inSpy(t, s, leakWithin, nil, func(prefix string) {
			go func() { time.Sleep(30 * time.Millisecond) }() // it is about to go, of which nothing tells
			sub := rdb.Subscribe(ctx, prefix+"inbox")
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

func TestCheckLeaksDoesNotBlameOtherTests(t *testing.T) {
	stop := make(chan struct{})
	defer close(stop)
	go func() { <-stop }()
	CheckLeaks(t, nil, "")
}
