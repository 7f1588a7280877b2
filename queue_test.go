package leased

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A handler may call testing.T.FailNow, or runtime.Goexit for another reason.
func TestADeliveryThatEndsItsGoroutineKeepsNothingFromTheOthers(t *testing.T) {
	for _, all := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var q asyncQueue[int]
			var got []int
			begins := make(chan struct{})
			deliver := func(items ...int) {
				<-begins
				got = append(got, items...)
				if slices.Contains(items, 2) {
					runtime.Goexit()
				}
			}
			if all {
				q.deliverAll = func(items []int) { deliver(items...) }
			} else {
				q.deliver = func(item int) { deliver(item) }
			}
			for item := range 4 {
				q.add(item)
			}
			time.Sleep(2 * gathering)
			synctest.Wait() // a delivery has begun
			for item := range 4 {
				q.add(4 + item)
			}
			close(begins)
			if done := q.wait(t.Context()); !done || !slices.Equal(got, []int{0, 1, 2, 3, 4, 5, 6, 7}) {
				t.Errorf("all together %v: delivered %v", all, got)
			}
			q.add(8)
			if done := q.wait(t.Context()); !done || !slices.Equal(got[len(got)-1:], []int{8}) {
				t.Errorf("all together %v: later, delivered %v", all, got)
			}
		})
	}
}

func TestThatLossesWereNotReportedIsLogged(t *testing.T) {
	const line = "some losses were not reported"
	for limit, want := range map[int]int{1: 1, 2: 0} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			unblocked, reported := make(chan struct{}), 0
			c := settled(t, onStub(t, 0, 0, WithMaxHold(time.Second), WithLogger(slog.New(slog.NewTextHandler(&out, nil))),
				WithLossHandler(func(LossEvent) { <-unblocked; reported++ })))
			c.losses.limit = limit
			for _, name := range []string{"a", "b", "c"} { // one is being reported, the others wait
				l, err := c.Mutex(name).LockContext(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = l.Unlock() }()
				time.Sleep(time.Second)
				synctest.Wait()
			}
			close(unblocked)
			synctest.Wait()
			if n := strings.Count(out.String(), line); n != want || reported != 3-want {
				t.Errorf("limit %d: logged %d times, %d reported", limit, n, reported)
			}
		})
	}
}
