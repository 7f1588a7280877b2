package leased

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// go-redis keeps a subscription locked while it dials, for seconds where nobody answers. If
// no echo arrived meanwhile, the watchdog, on which the deadlines of all locks depend, has
// the subscription closed.
func TestTheWatchdogDoesNotWaitForTheDialingOfASubscription(t *testing.T) {
	in := onStub(t, 0, 0).inbox[0]
	dials, answer := make(chan struct{}), make(chan struct{})
	var first sync.Once
	rdb := redis.NewClient(&redis.Options{
		Addr:          "127.0.0.1:1",
		DialerRetries: 1,
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			first.Do(func() { close(dials) })
			<-answer
			return nil, errors.New("there is no Redis")
		},
	})
	defer rdb.Close()
	sub := rdb.Subscribe(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer close(answer)
	all.Go(func() { _ = sub.Subscribe(t.Context(), in.channel) })
	<-dials

	now := time.Now()
	in.mu.Lock()
	in.sub, in.cut = sub, func() {} // a dialer that does not heed its context
	in.hearing.Enter(lockstate.Joined, now)
	in.hearing.RequireProbe()
	in.hearing.StartProbe(now, 0)
	in.mu.Unlock()
	returned := make(chan struct{})
	all.Go(func() {
		in.fire(now.Add(protocol.CommandTimeout+lockstate.EchoWait), nil)
		close(returned)
	})
	select {
	case <-returned:
	case <-time.After(10 * time.Second):
		t.Error("the watchdog waits")
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.broken {
		t.Error("the subscription is not made anew")
	}
}
