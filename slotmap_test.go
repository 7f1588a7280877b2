package leased

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// reloads counts them.
type reloads struct {
	mu sync.Mutex
	at []time.Time
}

func (r *reloads) ReloadState(context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at = append(r.at, time.Now())
}

// since returns when the reloads were, and forgets them.
func (r *reloads) since(began time.Time) (at []time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.at {
		at = append(at, t.Sub(began))
	}
	r.at = nil
	return at
}

// reloading returns a client without Redis and without an inbox, whose slots are r's.
func reloading(t *testing.T, r stateReloader) *Client {
	c := onStub(t, 0, 0)
	c.slotMap.rdb = r
	c.group.start(c.watchdog.run)
	return c
}

func TestVirtualSlotsAreReloadedHalfASecondApartWhileCommandsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reloads
		c := reloading(t, &r)
		refused := redisserver.Classify(&net.OpError{Op: "dial", Err: errors.New("connection refused")})
		began := time.Now()
		for range 25 { // for 2.4 s
			c.slotMap.commandFailed(refused)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		var want []time.Duration
		for i := range 15 { // the last one less than 5 s after the last failure
			want = append(want, time.Duration(i)*reloadEvery)
		}
		if got := r.since(began); !slices.Equal(got, want) {
			t.Errorf("reloaded after %v, want %v", got, want)
		}
	})
}

// frozenNode is a client of a Cluster one of whose nodes is frozen: a reload that asks that
// one comes back when its read timeout ends.
type frozenNode struct {
	reloads
	takes time.Duration    // until the client gives it up; 0: 5 s
	asks  func(n int) bool // whether the n-th reload asks the frozen one
	busy  int
	most  int
}

func (f *frozenNode) ForEachMaster(context.Context, func(context.Context, *redis.Client) error) error {
	f.mu.Lock()
	f.at = append(f.at, time.Now())
	n := len(f.at)
	f.busy++
	f.most = max(f.most, f.busy)
	f.mu.Unlock()
	if f.asks(n) {
		time.Sleep(cmp.Or(f.takes, 5*time.Second)) // of virtual time
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.busy--
	return nil
}

func (f *frozenNode) ReloadState(context.Context) { panic("does one after the other") }

func TestVirtualAReloadThatAsksAFrozenNodeHoldsUpNoOther(t *testing.T) {
	ms := func(list ...int) (all []time.Duration) {
		for _, n := range list {
			all = append(all, time.Duration(n)*time.Millisecond)
		}
		return all
	}
	for what, c := range map[string]struct {
		asks func(n int) bool
		want []time.Duration
		most int
	}{
		"the first": {func(n int) bool { return n == 1 }, ms(0, 250, 750, 1250, 1750, 2250, 2750, 3250, 3750, 4250, 4750), 2},
		"each":      {func(int) bool { return true }, ms(0, 250, 500, 750, 2000, 2250, 2500, 2750, 4000, 4250, 4500, 4750), 12},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := &frozenNode{asks: c.asks}
			client := reloading(t, f)
			began := time.Now()
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			time.Sleep(time.Minute)
			if got := f.since(began); !slices.Equal(got, c.want) || f.most != c.most {
				t.Errorf("%s: reloaded after %v, %d at once; want %v, %d", what, got, f.most, c.want, c.most)
			}
		})
	}
}

// A host that has vanished holds up each reload that asks it for half a minute. Reloads go on beside these, and
// are few.
func TestVirtualReloadsThatAskAVanishedHostHoldUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &frozenNode{takes: 25 * time.Second, asks: func(n int) bool { return n%3 != 0 }}
		client := reloading(t, f)
		began := time.Now()
		for range 120 { // for a minute
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			time.Sleep(500 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		back := time.Duration(0)
		for i, at := range f.since(began) {
			if i%3 == 2 { // it came back
				if at-back > 4*time.Second && at < 15*time.Second {
					t.Errorf("no reload came back between %v and %v", back, at)
				}
				back = at
			}
		}
		if f.most > reloadsInAll || f.most < 10 {
			t.Errorf("%d at once", f.most)
		}
	})
}

// What is sent after a failure finds the node that serves the slot now, also if the node
// that is asked for the slots first is the frozen one.
func TestVirtualWhatIsSentAfterAFailureWaitsForTheSlots(t *testing.T) {
	for what, c := range map[string]struct {
		asks func(n int) bool
		want time.Duration
	}{
		"slots of another node": {func(int) bool { return false }, 0},
		"the frozen one first":  {func(n int) bool { return n == 1 }, reloadHedge},
		"no answer":             {func(int) bool { return true }, reloadAwaited},
	} {
		synctest.Test(t, func(t *testing.T) {
			client := reloading(t, &frozenNode{asks: c.asks})
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			began := time.Now()
			client.slotMap.await(t.Context())
			if took := time.Since(began); took != c.want {
				t.Errorf("%s: sent after %v, want %v", what, took, c.want)
			}
			began = time.Now()
			if client.slotMap.await(t.Context()); time.Since(began) != 0 {
				t.Errorf("%s: what is sent later waits, too", what)
			}
			time.Sleep(time.Minute)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			began = time.Now()
			if client.slotMap.await(ctx); time.Since(began) != 0 {
				t.Errorf("%s: it waits longer than its command may", what)
			}
			time.Sleep(time.Minute)
		})
	}
}

func TestVirtualSlotsAreReloadedForWhatAnotherNodeMayMend(t *testing.T) {
	for what, c := range map[string]struct {
		err  error
		want bool
	}{
		"refused connection":    {&net.OpError{Op: "dial", Err: errors.New("connection refused")}, true},
		"connection closed":     {io.EOF, true},
		"timeout":               {context.DeadlineExceeded, true},
		"a slot that has moved": {answer("MOVED 42 127.0.0.1:7000"), true},
		"slots not served":      {answer("CLUSTERDOWN Hash slot not served"), true},
		"cut off and readable":  {answer("ERR Script attempted to execute a write command while the cluster is down and readonly"), true},
		"a new replica":         {answer("READONLY You can't write against a read only replica."), true},
		"a slot on its way":     {answer("TRYAGAIN Multiple keys request during rehashing of slot"), false},
		"out of memory":         {answer("OOM command not allowed"), false},
		"denied by an ACL":      {answer("NOPERM User app has no permissions"), false},
		"closed client":         {redisserver.ErrRedisClosed, false},
		"another type's value":  {otherTypeAnswer{}, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			var r reloads
			client := reloading(t, &r)
			fail := redisserver.Classify(c.err)
			fail.Err = silentError{} // which is not asked once more
			client.slotMap.commandFailed(fail)
			time.Sleep(time.Second / 2)
			if got := len(r.since(time.Now())) > 0; got != c.want {
				t.Errorf("%s: reloaded %v", what, got)
			}
		})
	}
}

// silentError panics when it is asked for its text.
type silentError struct{ error }

type answer string

func (a answer) Error() string { return string(a) }
func (answer) RedisError()     {}

// elsewhere is a server that the client reaches only by the slots that it reads again.
type elsewhere struct {
	*stubServer
	*reloads
}

func (e elsewhere) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	e.mu.Lock()
	lost := len(e.at) == 0
	e.mu.Unlock()
	if lost {
		return protocol.Answer{}, io.EOF
	}
	return e.stubServer.Do(ctx, k, c)
}

// The lock's own back-off would have it asked for after 20 s.
func TestVirtualALockIsAskedForRightAfterSlotsWereReloaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reloads
		c := onStub(t, 0, 0, WithBackOff(func() BackOff { return every(20 * time.Second) }))
		mu := c.Mutex("x")
		mu.Lock()   // the inbox fails for the first time, which has a lock ask again, too
		mu.Unlock() //nolint:staticcheck // that it comes in is the point
		synctest.Wait()
		c.slotMap.rdb = &r
		c.server = elsewhere{c.server.(*stubServer), &r}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		began := time.Now()
		l, err := mu.LockContext(ctx)
		if took := time.Since(began); err != nil || took > 2*reloadTakes {
			t.Fatalf("after %v: %v", took, err)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

type every time.Duration

func (d every) NextBackOff() time.Duration { return time.Duration(d) }

func TestSlotsAreThoseOfAClusterAlsoInsideAnotherType(t *testing.T) {
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer cluster.Close()
	for what, c := range map[string]struct {
		rdb  redis.UniversalClient
		want bool
	}{
		"a Cluster's":         {cluster, true},
		"a Cluster's, inside": {around.Cluster{ClusterClient: cluster}, true},
		"one server's":        {redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), false},
	} {
		client, err := New(c.rdb)
		if err != nil {
			t.Fatal(err)
		}
		if got := client.slotMap.rdb != nil; got != c.want {
			t.Errorf("%s: slots %v", what, got)
		}
		if got := client.slotMap.masters != nil; got != c.want {
			t.Errorf("%s: masters %v", what, got)
		}
		_ = client.Close()
	}
}

// blocks is a ReloadState of the user's that does not return before ctx ends, or panics.
type blocks struct{ panics bool }

func (b blocks) ReloadState(ctx context.Context) {
	if b.panics {
		panic("a user's type")
	}
	<-ctx.Done()
}

func TestVirtualAReloadThatBlocksOrPanicsHoldsNothingUp(t *testing.T) {
	for _, b := range []blocks{{}, {panics: true}} {
		synctest.Test(t, func(t *testing.T) {
			c := onStub(t, 0, 0)
			c.slotMap.rdb = b
			mu := c.Mutex("x")
			for range 10 {
				c.slotMap.reload()
				mu.Lock()
				mu.Unlock() //nolint:staticcheck // that it comes in is the point
				time.Sleep(time.Second)
			}
		})
	}
}

// uncanceled answers everything but the first cancel.
type uncanceled struct {
	*stubServer
	answers *atomic.Bool
}

func (m uncanceled) Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	if m.answers.Swap(true) {
		return m.stubServer.Cancel(ctx, batch)
	}
	results := make([]protocol.Canceled, len(batch))
	for i := range results {
		results[i].Fail = redisserver.Classify(errNoAnswer)
	}
	return results
}

// unanswering answers no request.
type unanswering struct{ *stubServer }

func (unanswering) Do(context.Context, *protocol.Keys, *protocol.Command) (protocol.Answer, error) {
	return protocol.Answer{}, errNoAnswer
}

func TestVirtualSlotsAreReloadedAfterAnyCommandWithoutAnswer(t *testing.T) {
	for what, failing := range map[string]func(c *Client){
		"request": func(c *Client) {
			c.server = unanswering{c.server.(*stubServer)}
			if _, err := c.Mutex("x").TryLockContext(context.Background()); !errors.Is(err, errNoAnswer) {
				t.Errorf("request: %v", err)
			}
			time.Sleep(time.Second) // of virtual time
		},
		"renewal": func(c *Client) {
			c.server = unrenewing{c.server.(*stubServer)}
			mu := c.Mutex("x")
			mu.Lock()
			time.Sleep(15 * time.Second) // a third of the TTL of 30 s is 10 s
			mu.Unlock()
		},
		"cancel": func(c *Client) {
			c.server = uncanceled{c.server.(*stubServer), new(atomic.Bool)}
			keys, err := protocol.NewKeys("", "x")
			if err != nil {
				t.Fatal(err)
			}
			c.canceler.add(&lockstate.Cancellation{Owner: &keys, ID: "unknown"})
			time.Sleep(time.Second) // of virtual time
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			var r reloads
			c := reloading(t, &r)
			c.once.Do(func() {}) // without an inbox, which would fail here, too
			failing(c)
			if len(r.since(time.Now())) == 0 {
				t.Errorf("%s: the slots were not read again", what)
			}
		})
	}
}

func TestVirtualSlotsAreReloadedWhenASubscriptionEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reloads
		c := onStub(t, 0, 0)
		c.slotMap.rdb = &r
		c.begin() // the inbox finds no Redis
		time.Sleep(5 * time.Second)
		if len(r.since(time.Now())) == 0 {
			t.Error("the slots were not read again")
		}
	})
}

// docs/deployments.md says what that costs.
func TestAClusterClientBehindSentinelCountsAsACluster(t *testing.T) {
	at := []string{"127.0.0.1:1"}
	for what, rdb := range map[string]redis.UniversalClient{
		"NewFailoverClusterClient": redis.NewFailoverClusterClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: at}),
		"NewUniversalClient":       redis.NewUniversalClient(&redis.UniversalOptions{MasterName: "m", Addrs: at, RouteRandomly: true}),
	} {
		defer rdb.Close()
		if kind, err := kindOf(rdb); kind != clustered || err != nil {
			t.Errorf("%s: %v, %v", what, kind, err)
		}
	}
}
