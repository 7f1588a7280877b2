package leased

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// What the documentation gives in figures, and takes too much of to be seen from outside.

func TestAHundredThousandLossesAreQueuedForAHandlerThatBlocks(t *testing.T) {
	redistest.CheckLeaks(t, nil, "")
	blocked, freed := make(chan struct{}), make(chan struct{})
	told := 0
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	c, err := New(rdb, WithLossHandler(func(LossEvent) {
		if told++; told == 1 {
			close(blocked)
			<-freed
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	c.losses.add(LossEvent{})
	<-blocked
	for n := range 100_000 {
		if !c.losses.add(LossEvent{}) {
			t.Fatalf("after %d losses there was no room", n)
		}
	}
	if c.losses.add(LossEvent{}) {
		t.Error("there was room for one more")
	}
	close(freed)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if told != 100_001 {
		t.Errorf("it was told of %d losses", told)
	}
}

func TestTheDefaultBackOffBeginsAtFiftyMilliseconds(t *testing.T) {
	var sum time.Duration
	const draws = 10_000
	for range draws {
		first := defaultBackOff().NextBackOff()
		if first < 25*time.Millisecond || first > 75*time.Millisecond {
			t.Fatalf("the first pause is %v, and at random up to a half less or more than 50 ms", first)
		}
		sum += first
	}
	if mean := sum / draws; mean < 48*time.Millisecond || mean > 52*time.Millisecond { // 14 times the deviation of the mean
		t.Errorf("the first pauses are %v on average", mean)
	}
}
