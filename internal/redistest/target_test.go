package redistest

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestKeysOnBothAreThoseOfTheTest(t *testing.T) {
	OnBoth(t, func(t *testing.T, s Target) {
		ctx := t.Context()
		rdb := s.NewClient(t)
		odd := Prefix(t) + `a[*]?\:`
		for _, k := range []string{s.Prefix + "b", s.Prefix + "a", "stranger", odd + "x"} {
			if err := rdb.Set(ctx, k, 1, time.Minute).Err(); err != nil {
				t.Fatal(err)
			}
		}
		got, err := s.Keys(ctx)
		if want := []string{s.Prefix + "a", s.Prefix + "b"}; err != nil || !slices.Equal(got, want) {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
		got, err = Keys(ctx, rdb, odd)
		if want := []string{odd + "x"}; err != nil || !slices.Equal(got, want) {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	})
}

func TestKeysExpireOnBothWithoutHelp(t *testing.T) {
	t.Parallel()
	OnBoth(t, func(t *testing.T, s Target) {
		rdb := s.NewClient(t)
		if err := rdb.Set(t.Context(), s.Prefix+"k", 1, 30*time.Millisecond).Err(); err != nil {
			t.Fatal(err)
		}
		Eventually(t, "expiry", func() bool { return rdb.Exists(t.Context(), s.Prefix+"k").Val() == 0 })
	})
}

// It runs twice, because the first bubble can leave something behind that breaks the second.
func TestMiniRunsOnFakeTime(t *testing.T) {
	for range 2 {
		synctest.Test(t, func(t *testing.T) {
			ctx := context.Background()
			m := Mini(t)
			rdb := MiniClient(t, m)
			CheckLeaks(t, rdb, "p:")
			sub := rdb.Subscribe(ctx, "p:news")
			defer sub.Close()
			heard := sub.Channel()
			if err := rdb.Set(ctx, "p:k", 1, 30*time.Second).Err(); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if n := rdb.Publish(ctx, "p:news", "x").Val(); n != 1 {
				t.Errorf("%d subscribers", n)
			}
			if got := (<-heard).Payload; got != "x" {
				t.Errorf("heard %q", got)
			}
			time.Sleep(29 * time.Second)
			if rdb.Exists(ctx, "p:k").Val() != 1 {
				t.Error("expired too early")
			}
			time.Sleep(2 * time.Second)
			if rdb.Exists(ctx, "p:k").Val() != 0 {
				t.Error("did not expire")
			}
		})
	}
}
