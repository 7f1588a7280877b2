package leased

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
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

// blackHole is an address from which no packet returns: dialing it ends with its context.
type blackHole struct {
	mu    sync.Mutex // guards lasts
	lasts []time.Duration
}

func (h *blackHole) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	began := time.Now()
	<-ctx.Done()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lasts = append(h.lasts, time.Since(began))
	return nil, ctx.Err()
}

// dialed returns for how long each address that was given up was dialed.
func (h *blackHole) dialed() []time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.lasts)
}

func inBlackHole(t *testing.T, f func(t *testing.T, h *blackHole, o *redis.Options)) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		var h blackHole
		f(t, &h, &redis.Options{Addr: "127.0.0.1:1", Dialer: h.dial})
	})
}

// subscribing returns the inbox of a client of rdb, which has begun to subscribe.
func subscribing(t *testing.T, rdb redis.UniversalClient, opts ...Option) *inbox {
	t.Helper()
	t.Cleanup(func() { rdb.Close() })
	c, err := New(rdb, append([]Option{WithLogger(slog.New(slog.DiscardHandler))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.begin()
	return c.inbox[0]
}

// A caller waits for the first subscription, and a waiter for messages, as if each attempt took 2 s.
func TestASubscriptionWhoseDialingTakesLongHoldsUpNobody(t *testing.T) {
	inBlackHole(t, func(t *testing.T, h *blackHole, o *redis.Options) {
		o.DialTimeout = time.Minute
		in := subscribing(t, redis.NewClient(o))
		for _, at := range []struct {
			begun          time.Duration
			settled, polls bool
		}{{1900 * time.Millisecond, false, false}, {2100 * time.Millisecond, true, false}, {5900 * time.Millisecond, true, false}, {6100 * time.Millisecond, true, true}} {
			time.Sleep(at.begun - time.Since(in.client.began))
			synctest.Wait()
			if settled, polls := in.client.inbox.settled(), in.polls(); settled != at.settled || polls != at.polls {
				t.Errorf("after %v: settled %v, polls %v; want %+v", at.begun, settled, polls, at)
			}
		}
		if got := h.dialed(); len(got) > 0 {
			t.Errorf("given up after %v", got)
		}
	})
}

// Packets that were lost in an outage are sent again after seconds, so dialing that began in it ends soon
// after it. One that has begun since then is left alone.
func TestDialingThatBeganInAnOutageEndsSoonAfterIt(t *testing.T) {
	for back, want := range map[time.Duration]time.Duration{
		time.Second:     confirmWait, // it may have begun after the outage
		9 * time.Second: 9*time.Second + backWait,
		time.Hour:       confirmWait + maxDialing,
	} {
		inBlackHole(t, func(t *testing.T, h *blackHole, o *redis.Options) {
			o.DialTimeout = time.Minute
			in := subscribing(t, redis.NewClient(o))
			time.Sleep(min(back, want))
			if back < want {
				in.redisIsBack()
			}
			time.Sleep(want - min(back, want) + time.Millisecond)
			if got := h.dialed(); !slices.Equal(got, []time.Duration{want}) {
				t.Errorf("if Redis is back after %v, given up after %v, want %v", back, got, want)
			}
		})
	}
}

// An operator is told soon, however long a dialing may take.
func TestDialingThatTakesLongIsLoggedInTime(t *testing.T) {
	inBlackHole(t, func(t *testing.T, _ *blackHole, o *redis.Options) {
		o.DialTimeout = time.Minute
		var text strings.Builder
		subscribing(t, redis.NewClient(o), WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		time.Sleep(failsLong + 2*confirmWait)
		synctest.Wait()
		if n := strings.Count(text.String(), "no subscription can be made"); n != 1 {
			t.Errorf("logged %d times: %s", n, text.String())
		}
	})
}

// Another master may accept the subscription at once.
func TestDialingInAClusterTakesLongOnlyAfterAnotherMasterHadTooLittleTime(t *testing.T) {
	inBlackHole(t, func(t *testing.T, h *blackHole, o *redis.Options) {
		var masters [2]*redis.Client
		for i, addr := range []string{"127.0.0.1:2", "127.0.0.1:3"} {
			o.Addr = addr
			masters[i] = redis.NewClient(o)
			defer masters[i].Close()
		}
		next := 0
		refuse := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("nobody there") }
		in := subscribing(t, around.Cluster{
			ClusterClient: redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, Dialer: refuse}),
			Master: func(string) (*redis.Client, error) {
				next++
				return masters[next%2], nil
			},
		})
		time.Sleep(15 * time.Second)
		in.halt()
		synctest.Wait()
		got := h.dialed()
		want := []time.Duration{confirmWait, confirmWait + 5*time.Second, confirmWait}
		if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
			t.Errorf("dialed for %v, want %v", got, want)
		}
	})
}
