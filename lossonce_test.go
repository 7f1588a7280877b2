package leased

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Close ends a lease, and before that is told another goroutine finds the lease lost:
// that is one loss, with its reason.
func TestALossBesideACloseIsToldOnce(t *testing.T) {
	told := make(chan LossEvent, 10)
	c, err := New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), WithLossHandler(func(ev LossEvent) { told <- ev }))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	k, err := newKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	e := c.find(&k)
	w := &caller{phase: inside, opts: &c.opts.lock}
	e.lock.grant.req.ttl = time.Second
	e.lock.inside.push(w)
	var byClosing, byLosing effects
	e.mu.Lock()
	e.lock.closed = true
	w.ended = byClose
	byClosing.ended = []loss{{caller: w}}
	e.lock.end(w, "the key was gone", time.Now(), &byLosing)
	e.lock.inside.remove(w)
	e.mu.Unlock()
	for _, fx := range []*effects{&byClosing, &byLosing} {
		for _, l := range fx.ended {
			e.end(l)
		}
	}
	c.losses.wait(t.Context())
	if n := len(told); n != 1 {
		t.Fatalf("told %d times", n)
	}
	if ev := <-told; ev.Reason != "the key was gone" {
		t.Errorf("told %+v", ev)
	}
	c.retire(e)
}
