package redisserver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestCommandsThatBeginTogetherShareTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base, stop := context.WithCancel(context.Background())
		d := Deadlines{Base: base}
		began := time.Now()
		first := d.Within(2 * time.Second)
		for range 100 {
			asked := time.Now()
			ctx := d.Within(2 * time.Second)
			end, _ := ctx.Deadline()
			if left := end.Sub(asked); left > 2*time.Second || left < 2*time.Second-2*time.Second/sharedPart {
				t.Fatalf("a command that may take 2s has %v", left)
			}
			if shared := time.Since(began) < 2*time.Second/sharedPart; shared != (ctx == first) {
				t.Fatalf("after %v shared: %v", time.Since(began), ctx == first)
			}
			time.Sleep(time.Millisecond)
		}
		for _, limit := range []time.Duration{time.Nanosecond, time.Millisecond, time.Second, 9 * time.Second} {
			asked := time.Now()
			if end, _ := d.Within(limit).Deadline(); end.Sub(asked) != limit {
				t.Errorf("a command that may take %v has %v", limit, end.Sub(asked))
			}
		}
		last := d.Within(2 * time.Second)
		stop()
		if last.Err() == nil || d.Within(2*time.Second).Err() == nil {
			t.Error("a command goes on when the client has ended")
		}
	})
}
