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
			if left := end.Sub(asked); left > 2*time.Second || left < 2*time.Second-2*time.Second/sharedDivisor {
				t.Fatalf("a command that may take 2s has %v", left)
			}
			if shared := time.Since(began) < 2*time.Second/sharedDivisor; shared != (ctx == first) {
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

// Each limit has a slot of its own. If two limits alternated in one slot, every command would create
// a context, and nothing ends such a context before its deadline.
func TestCommandsOfTwoLimitsDoNotTakeEachOthersContext(t *testing.T) {
	base, stop := context.WithCancel(context.Background())
	defer stop()
	d := Deadlines{Base: base}
	var limits []time.Duration
	var ctxs []context.Context
	for i := range d.slots {
		limit := time.Hour + time.Duration(i*len(d.slots)) // the same remainder
		limits, ctxs = append(limits, limit), append(ctxs, d.Within(limit))
	}
	for i, limit := range limits {
		if d.Within(limit) != ctxs[i] {
			t.Errorf("commands of limit %d do not share a context beside others", i)
		}
	}
	if end, _ := d.Within(time.Minute).Deadline(); time.Until(end) > time.Minute {
		t.Errorf("a command of one limit more has %v", time.Until(end))
	}
}
