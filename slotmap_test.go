package leased

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
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
func reloading(t *testing.T, r redisserver.Slots) *Client {
	c := onStub(t, 0, 0)
	c.slotMap.rdb = r
	c.slotMap.visitor, _ = r.(redisserver.Visitor)
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

// someMaster is not dialed.
var someMaster = redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})

func (f *frozenNode) ForEachMaster(ctx context.Context, visit func(context.Context, *redis.Client) error) error {
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
	return visit(ctx, someMaster)
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

// When commands have succeeded for a while, a slot that moves is about another move.
func TestVirtualTheNextMoveOfASlotIsAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := reloading(t, &frozenNode{asks: func(int) bool { return false }})
		moved := &protocol.Failure{Err: io.EOF, Kind: protocol.RefusedNow, Moved: true}
		moves := func(key string) bool {
			client.slotMap.commandFailed(moved)
			return client.slotMap.moves(key, time.Minute, time.Now())
		}
		if !moves("x") {
			t.Error("the first move is an outage")
		}
		time.Sleep(movingTime)
		if moves("x") || !moves("y") {
			t.Error("a slot that goes on moving is not an outage, or one that has just begun is")
		}
		time.Sleep(time.Minute)
		if !moves("x") {
			t.Error("the next move is an outage")
		}
		for range 20 { // another master is down, so the map is reloaded all the time
			time.Sleep(2 * time.Second)
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			moves("y")
		}
		if moves("y") || !moves("x") {
			t.Error("while the map is reloaded for others, the next move is an outage, or one that goes on is none")
		}
		time.Sleep(time.Minute)
		one := onStub(t, 0, 0).slotMap
		if one.moves("x", time.Minute, time.Now()) || len(one.moved) > 0 {
			t.Error("a slot moves where there are none")
		}
	})
}

// A renewal has to be repeated in time, so what is passing for other commands is an outage for one whose TTL is short.
func TestVirtualASlotMovesForNoLongerThanACommandCanWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := reloading(t, &frozenNode{asks: func(int) bool { return false }})
		client.slotMap.commandFailed(&protocol.Failure{Err: io.EOF, Kind: protocol.RefusedNow, Moved: true})
		moves := func(most time.Duration) bool { return client.slotMap.moves("x", most, time.Now()) }
		if !moves(time.Second) {
			t.Error("the move is an outage at once")
		}
		time.Sleep(time.Second - 1)
		if !moves(time.Second) {
			t.Error("the move is an outage too soon")
		}
		time.Sleep(time.Nanosecond)
		if moves(time.Second) || !moves(movingTime) {
			t.Error("the move is no outage for who cannot wait, or is one for others")
		}
		time.Sleep(time.Minute)
	})
}

// Its node may be dead or frozen, and the inbox would notice that only by an echo that does not come.
func TestVirtualAReloadTellsTheInboxWhetherItsNodeIsAMaster(t *testing.T) {
	for node, want := range map[string]bool{someMaster.Options().Addr: false, "127.0.0.1:2": true} {
		synctest.Test(t, func(t *testing.T) {
			client := reloading(t, &strangers{first: 1})
			in := client.inbox[0]
			in.mu.Lock()
			in.sub, in.cut, in.node = someMaster.Subscribe(t.Context()), func() {}, node
			in.mu.Unlock()
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			time.Sleep(time.Millisecond)
			synctest.Wait()
			in.mu.Lock()
			left := in.broken
			in.mu.Unlock()
			if left != want {
				t.Errorf("at %s: it leaves its node %v", node, left)
			}
			time.Sleep(time.Minute)
		})
	}
}

// strangers is a client of a Cluster some of whose nodes have come back without their part in it, and name no master.
type strangers struct {
	reloads
	first int // the first node that is asked and is none of them
}

func (s *strangers) ForEachMaster(ctx context.Context, visit func(context.Context, *redis.Client) error) error {
	s.mu.Lock()
	s.at = append(s.at, time.Now())
	n := len(s.at)
	s.mu.Unlock()
	if n < s.first {
		return nil
	}
	return visit(ctx, someMaster)
}

func TestVirtualAReloadThatNamesNoMasterIsRepeated(t *testing.T) {
	for first, want := range map[int]int{1: 1, 3: 3, 100: reloadTries} {
		synctest.Test(t, func(t *testing.T) {
			s := &strangers{first: first}
			client := reloading(t, s)
			client.slotMap.commandFailed(redisserver.Classify(io.EOF))
			time.Sleep(time.Millisecond)
			if got := len(s.since(time.Now())); got != want {
				t.Errorf("if the node that is asked at the try %d names masters, %d are asked", first, got)
			}
			time.Sleep(time.Minute)
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
		if got := client.slotMap.visitor != nil; got != c.want {
			t.Errorf("%s: visitor %v", what, got)
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
		if d, err := deploymentOf(rdb); d.Kind != redisserver.Cluster || err != nil {
			t.Errorf("%s: %v, %v", what, d.Kind, err)
		}
	}
}

// twoMasters is the client of a Cluster of two masters. One of them hangs, and has the locks whose
// names begin with h.
type twoMasters struct{ hanging, well *redis.Client }

func newTwoMasters() *twoMasters { return &twoMasters{new(redis.Client), new(redis.Client)} }

func (m *twoMasters) MasterForKey(_ context.Context, key string) (*redis.Client, error) {
	if strings.HasPrefix(key, "h") {
		return m.hanging, nil
	}
	return m.well, nil
}

// halfHanging is a stub server that is such a Cluster. As go-redis does, it answers a batch when the
// last of its masters has answered. It notes the batches: the first letters of the locks' names.
type halfHanging struct {
	*stubServer
	takes time.Duration // until the master that hangs has answered

	mu      sync.Mutex
	renewed []string
	cancels []string
	now     int // cancels of the master that hangs which are under way
	most    int
}

func (s *halfHanging) Renew(ctx context.Context, batch []protocol.Renewal) {
	var names string
	for i := range batch {
		names += batch[i].Keys.Lock[:1]
	}
	s.mu.Lock()
	s.renewed = append(s.renewed, names)
	s.mu.Unlock()
	if strings.Contains(names, "h") {
		time.Sleep(protocol.CommandTimeout) // of virtual time: until it is given up
	}
	s.stubServer.Renew(ctx, batch)
	for i := range batch {
		if batch[i].Keys.Lock[0] == 'h' {
			batch[i] = protocol.Renewal{Owner: batch[i].Owner, Keys: batch[i].Keys, Req: batch[i].Req, At: batch[i].At, Err: errNoAnswer}
		}
	}
}

func (s *halfHanging) Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	var names string
	for i := range batch {
		names += batch[i].Keys.Lock[:1]
	}
	hangs := strings.Contains(names, "h")
	s.mu.Lock()
	takes := s.takes
	if hangs {
		s.now++
	}
	s.most = max(s.most, s.now)
	s.mu.Unlock()
	if hangs {
		select {
		case <-time.After(takes): // of virtual time: the answer comes
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if hangs {
		s.now--
	}
	if ctx.Err() != nil {
		results := make([]protocol.Canceled, len(batch))
		for i := range results {
			results[i].Fail = &protocol.Failure{Err: ctx.Err(), Kind: protocol.NoAnswer}
		}
		return results
	}
	s.cancels = append(s.cancels, names)
	return s.stubServer.Cancel(ctx, batch)
}

func (s *halfHanging) answersAfter(takes time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.takes = takes
}

func (s *halfHanging) canceled() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.cancels)
}

// onHalfHanging returns a client of such a Cluster.
func onHalfHanging(t *testing.T, masters redisserver.Masters, opts ...Option) (*Client, *halfHanging) {
	c := onStub(t, 0, 0, append([]Option{WithLossHandler(func(LossEvent) {})}, opts...)...)
	s := &halfHanging{stubServer: c.server.(*stubServer), takes: time.Second}
	c.server = s
	c.slotMap.masters = masters
	return c, s
}

// lockThem locks one lock of each name.
func lockThem(t *testing.T, c *Client, names ...string) (leases []*Lease) {
	t.Helper()
	for _, name := range names {
		l, err := c.Mutex(name).LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	return leases
}

func TestVirtualAMasterThatHangsDelaysNoRenewalAtTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c, s := onHalfHanging(t, newTwoMasters(), WithTTL(ttl))
		began := time.Now()
		held := lockThem(t, c, "h1", "w1", "h2", "w2", "w3")
		time.Sleep(ttl/3 + time.Millisecond) // to the first renewals
		for _, l := range held {
			if name := l.entry.keys.Name(); name[0] == 'w' && l.TrustedUntil().Before(began.Add(ttl)) {
				t.Errorf("%s has no outcome", name)
			}
		}
		s.mu.Lock()
		slices.Sort(s.renewed)
		if got := fmt.Sprint(s.renewed); got != "[hh www]" {
			t.Errorf("renewed in batches of %s", got)
		}
		s.mu.Unlock()
		time.Sleep(10 * ttl)
		for _, l := range held {
			if name, err := l.entry.keys.Name(), l.Unlock(); errors.Is(err, ErrLeaseLost) != (name[0] == 'h') {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// finder is a MasterForKey of the user's.
type finder func(ctx context.Context) error

func (f finder) MasterForKey(ctx context.Context, _ string) (*redis.Client, error) {
	return nil, f(ctx)
}

func TestVirtualRenewalsWhoseMasterCannotBeNamedGoTogether(t *testing.T) {
	for what, f := range map[string]finder{
		"an error":               func(context.Context) error { return errNoAnswer },
		"a panic":                func(context.Context) error { panic("a user's type") },
		"the goroutine's end":    func(context.Context) error { runtime.Goexit(); return nil },
		"nothing, for some time": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		synctest.Test(t, func(t *testing.T) {
			const ttl = 3 * time.Second
			c, s := onHalfHanging(t, f, WithTTL(ttl))
			held := lockThem(t, c, "w1", "w2", "w3")
			time.Sleep(10 * ttl)
			s.mu.Lock()
			if len(s.renewed) < 20 || slices.ContainsFunc(s.renewed, func(names string) bool { return names != "www" }) {
				t.Errorf("%s: renewed in batches of %v", what, s.renewed)
			}
			s.mu.Unlock()
			unlockAll(t, held)
		})
	}
}

// A user's type may do anything in MasterForKey, so the watchdog must not wait for it.
func TestVirtualALossIsToldThoughNoMasterIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c, _ := onHalfHanging(t, finder(func(context.Context) error {
			time.Sleep(time.Hour) // of virtual time: it hangs
			return errNoAnswer
		}), WithTTL(ttl))
		began := time.Now()
		for _, l := range lockThem(t, c, "w1", "w2") {
			<-l.Context().Done()
			if took := time.Since(began); took > ttl {
				t.Errorf("%s: the loss was told after %v", l.entry.keys.Name(), took)
			}
			if err := l.Unlock(); !errors.Is(err, ErrLeaseLost) {
				t.Errorf("%s: %v", l.entry.keys.Name(), err)
			}
		}
		time.Sleep(2 * time.Hour) // both lookups end
	})
}

// cancel has the client cancel an unknown request.
func cancel(t *testing.T, c *Client, name string) {
	t.Helper()
	keys, err := protocol.NewKeys("", name)
	if err != nil {
		t.Fatal(err)
	}
	c.canceler.add(&lockstate.Cancellation{Owner: &keys, ID: "unknown " + name})
}

func TestVirtualAMasterThatHangsDelaysNoCancelAtTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := onHalfHanging(t, newTwoMasters())
		c.group.start(c.watchdog.run)
		is := func(after string, want ...string) {
			t.Helper()
			synctest.Wait()
			if got := s.canceled(); !slices.Equal(got, want) {
				t.Errorf("%s, canceled %q, want %q", after, got, want)
			}
		}
		cancel(t, c, "h1")
		is("at first")
		for _, name := range []string{"w1", "h2", "w2", "h3"} {
			cancel(t, c, name)
			synctest.Wait()
		}
		is("at once", "w", "w")
		time.Sleep(s.takes)
		is("when the first has an answer", "w", "w", "h")
		time.Sleep(s.takes)
		is("when those that waited for it have", "w", "w", "h", "hh")
		if s.most != 1 {
			t.Errorf("%d round trips at a time to the master that hangs", s.most)
		}
	})
}

// A cancel without an answer is sent again after a second.
func TestVirtualACancelAtAMasterThatHangsIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := onHalfHanging(t, newTwoMasters())
		c.group.start(c.watchdog.run)
		s.answersAfter(time.Minute)
		cancel(t, c, "h")
		time.Sleep(protocol.CommandTimeout + time.Second/2)
		s.answersAfter(0)
		if got := s.canceled(); len(got) != 0 {
			t.Fatalf("canceled %q", got)
		}
		time.Sleep(time.Second)
		if got := s.canceled(); !slices.Equal(got, []string{"h"}) {
			t.Errorf("canceled %q", got)
		}
	})
}

func TestVirtualCloseWaitsForTheCancelsOfEachMaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := onHalfHanging(t, newTwoMasters())
		for _, name := range []string{"h1", "w1", "h2"} {
			cancel(t, c, name)
			synctest.Wait()
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if got := s.canceled(); !slices.Equal(got, []string{"w", "h", "h"}) {
			t.Errorf("canceled %q", got)
		}
	})
}
