package redisserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

// road is a hook that stands in for the network and the server: a round trip takes a while, and each
// command is answered with its last argument. Its time is that of the test's bubble.
type road struct {
	takes func(trip []redis.Cmder) time.Duration // how long a round trip takes; nil: a millisecond
	fails func(trip []redis.Cmder) error         // the trip's error, if any; nil: every trip is answered
	sees  func(ctx context.Context, n int)       // called with the context of a trip of n commands; may be nil

	mu    sync.Mutex // guards what follows
	trips [][]string // what was sent together, each command by its last argument
	most  int        // round trips under way at once
	now   int
}

func (r *road) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *road) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return r.travel(ctx, []redis.Cmder{cmd}) }
}

func (r *road) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return r.travel
}

// travel makes a round trip. Like a connection, it observes the context's deadline but not its
// cancellation.
func (r *road) travel(ctx context.Context, trip []redis.Cmder) error {
	var what []string
	for _, cmd := range trip {
		what = append(what, lastOf(cmd))
	}
	r.mu.Lock()
	r.trips = append(r.trips, what)
	r.now++
	r.most = max(r.most, r.now)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.now--
	}()
	if r.sees != nil {
		r.sees(ctx, len(trip))
	}
	takes := time.Millisecond
	if r.takes != nil {
		takes = r.takes(trip)
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < takes {
		time.Sleep(time.Until(deadline)) // in virtual time, as a read with a deadline does
		return &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}
	}
	time.Sleep(takes) // in virtual time
	if r.fails != nil {
		if err := r.fails(trip); err != nil {
			return err
		}
	}
	for _, cmd := range trip {
		if once, ok := cmd.(onceCmd); ok && once.Err() == nil {
			once.SetVal(lastOf(cmd))
		}
	}
	return nil
}

func lastOf(cmd redis.Cmder) string { return fmt.Sprint(cmd.Args()[len(cmd.Args())-1]) }

// sizes returns how many commands each round trip so far had.
func (r *road) sizes() (all []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, trip := range r.trips {
		all = append(all, len(trip))
	}
	return all
}

// onRoad has f send over r, in virtual time.
func onRoad(t *testing.T, r *road, f func(t *testing.T, s *Server)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		o := redistest.Options("127.0.0.1:0")
		o.ContextTimeoutEnabled = true // so that the client itself is used, with its hook
		rdb := redis.NewClient(o)
		defer rdb.Close()
		rdb.AddHook(r)
		f(t, New(rdb, ""))
	})
}

// outcome is what a sender was told, and when.
type outcome struct {
	val      any
	err      error
	panicked any
	at       time.Duration
}

// sender sends commands at once and collects their outcomes.
type sender struct {
	s     *Server
	began time.Time
	all   sync.WaitGroup
	mu    sync.Mutex // guards got
	got   map[string]outcome
}

func newSender(s *Server) *sender {
	return &sender{s: s, began: time.Now(), got: map[string]outcome{}}
}

// send sends what in a goroutine, and returns once that goroutine is blocked.
func (x *sender) send(what string, limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	x.under(ctx, what, cancel)
}

func (x *sender) under(ctx context.Context, what string, cancel context.CancelFunc) {
	x.all.Go(func() {
		defer cancel()
		var o outcome
		defer func() {
			o.panicked, o.at = recover(), time.Since(x.began)
			x.mu.Lock()
			defer x.mu.Unlock()
			x.got[what] = o
		}()
		o.err = errors.New("ended by the hook")
		o.val, o.err = x.s.run(ctx, &RenewScript, []any{"key"}, what)
	})
	synctest.Wait()
}

func (x *sender) sendMany(n int, what string) {
	for i := range n {
		x.send(fmt.Sprint(what, i), protocol.CommandTimeout)
	}
}

// answered fails the test unless what was answered, after took.
func (x *sender) answered(t *testing.T, what string, took time.Duration) {
	t.Helper()
	x.all.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	if o := x.got[what]; o.err != nil || o.panicked != nil || o.val != what || o.at != took {
		t.Errorf("%s: %+v, want its own answer after %v", what, o, took)
	}
}

// failed fails the test unless what has failed with text, after took.
func (x *sender) failed(t *testing.T, what, text string, took time.Duration) {
	t.Helper()
	x.all.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	if o := x.got[what]; o.err == nil || o.panicked != nil || !strings.Contains(o.err.Error(), text) || o.at != took {
		t.Errorf("%s: %+v, want %q after %v", what, o, text, took)
	}
}

func TestACommandThatIsAloneIsSentByItself(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		for i := range 5 {
			x, what := newSender(s), fmt.Sprint(i)
			x.send(what, time.Second)
			x.answered(t, what, time.Millisecond)
		}
	})
	if want := []int{1, 1, 1, 1, 1}; !slices.Equal(r.sizes(), want) {
		t.Errorf("sent %v", r.sizes())
	}
}

// A server writes an answer before a message that was published earlier, unless the same client
// has another answer coming.
func TestAPingLeavesAheadOfACommandWhoseMessageIsWaitedFor(t *testing.T) {
	r := &road{fails: func(trip []redis.Cmder) error {
		if lastOf(trip[0]) != "ping" {
			return nil
		}
		trip[0].SetErr(replyError("NOPERM this user has no permissions to run the 'ping' command"))
		trip[1].(onceCmd).SetVal(lastOf(trip[1]))
		if len(trip) > 1 {
			return nil
		}
		return trip[0].Err()
	}}
	onRoad(t, r, func(t *testing.T, s *Server) {
		send := func(heard bool, what string) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if val, err := s.send(ctx, heard, &RenewScript, lineOf([]any{"key"}, what)); err != nil || val != what {
				t.Errorf("%s: answered %v, %v", what, val, err)
			}
		}
		send(false, "silent")
		send(true, "heard")
		if n := s.Commands(); n != 3 {
			t.Errorf("counted %d commands", n)
		}
		x := newSender(s)
		x.sendMany(4, "before")
		send(true, "behind others")
		x.all.Wait()
	})
	var sent []string
	for _, trip := range r.trips {
		sent = append(sent, strings.Join(trip, ", "))
	}
	if want := []string{"silent", "ping, heard", "before0", "before1", "before2", "before3", "behind others"}; !slices.Equal(sent, want) {
		t.Errorf("sent %q", sent)
	}
}

func TestCommandsThatCameWhileFourWereUnderWayLeaveTogether(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(20, "c")
		for i := range 20 {
			x.answered(t, fmt.Sprint("c", i), time.Duration(1+min(i/4, 1))*time.Millisecond)
		}
		if n := s.batches.underWay; n != 0 {
			t.Errorf("%d are under way when all have returned", n)
		}
	})
	if want := []int{1, 1, 1, 1, 16}; !slices.Equal(r.sizes(), want) {
		t.Errorf("sent %v", r.sizes())
	}
}

func TestABatchIsBounded(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4+maxTogether+10, "c")
		for i := range 4 + maxTogether + 10 {
			x.answered(t, fmt.Sprint("c", i), time.Duration(1+min(i/4, 1))*time.Millisecond)
		}
	})
	got := r.sizes()
	slices.Sort(got) // two batches leave at the same time
	if want := []int{1, 1, 1, 1, 10, maxTogether}; !slices.Equal(got, want) {
		t.Errorf("sent %v", got)
	}
}

// slowly has the round trips whose first command begins with of take that long, and all others a
// millisecond.
func slowly(of string, takes time.Duration) func([]redis.Cmder) time.Duration {
	return func(trip []redis.Cmder) time.Duration {
		if strings.HasPrefix(lastOf(trip[0]), of) {
			return takes
		}
		return time.Millisecond
	}
}

func TestCommandsThatHangDoNotHoldUpOthers(t *testing.T) {
	r := &road{takes: slowly("hangs", time.Hour)}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "hangs")
		x.sendMany(10, "c")
		for i := range 10 {
			o := func() outcome { x.mu.Lock(); defer x.mu.Unlock(); return x.got[fmt.Sprint("c", i)] }
			time.Sleep(patience + time.Millisecond - time.Since(x.began))
			synctest.Wait()
			if got := o(); got.err != nil || got.val == nil || got.at != patience+time.Millisecond {
				t.Errorf("c%d: %+v", i, got)
			}
		}
		y := newSender(s) // the commands that hang no longer count
		y.sendMany(4, "d")
		for i := range 4 {
			y.answered(t, fmt.Sprint("d", i), time.Millisecond)
			x.failed(t, fmt.Sprint("hangs", i), "i/o timeout", protocol.CommandTimeout)
		}
		if b := s.batches; b.underWay != 0 || len(b.queue) != 0 {
			t.Errorf("%d are under way, and %d queued, when all have returned", b.underWay, len(b.queue))
		}
	})
	if want := []int{1, 1, 1, 1, 10, 1, 1, 1, 1}; !slices.Equal(r.sizes(), want) {
		t.Errorf("sent %v", r.sizes())
	}
}

// A round trip of the commands that were sent last returns, then others hang, and the timer is still running.
func TestCommandsThatHangAnewDoNotHoldUpOthers(t *testing.T) {
	r := &road{takes: slowly("hangs", time.Hour)}
	onRoad(t, r, func(t *testing.T, s *Server) {
		hung := newSender(s)
		defer hung.all.Wait()
		for i := range 3 {
			hung.sendMany(4, "hangs")
			x := newSender(s)
			x.send("first", time.Second)
			time.Sleep(time.Millisecond) // in virtual time
			x.send("second", time.Second)
			for _, what := range []string{"first", "second"} {
				x.answered(t, what, patience+time.Millisecond)
			}
			if t.Failed() {
				t.Fatalf("in round %d", i)
			}
		}
	})
}

func TestHowManyRoundTripsAreUnderWayIsBoundedThoughOthersHang(t *testing.T) {
	r := &road{takes: slowly("hangs", time.Hour)}
	onRoad(t, r, func(t *testing.T, s *Server) {
		hung, x := newSender(s), newSender(s)
		defer hung.all.Wait()
		hung.sendMany(4, "hangs")
		x.sendMany(atOnce*maxTogether+10, "c")
		for i := range atOnce*maxTogether + 10 {
			x.answered(t, fmt.Sprint("c", i), patience+time.Duration(1+i/(atOnce*maxTogether))*time.Millisecond)
		}
	})
	if want := 4 + atOnce; r.most != want {
		t.Errorf("%d round trips were under way at once, want %d", r.most, want)
	}
}

func TestEachCommandEndsWithItsOwnDeadline(t *testing.T) {
	for what, takes := range map[string]time.Duration{"whose batch hangs": time.Hour, "whose batch is late": 50 * time.Millisecond} {
		t.Run(what, func(t *testing.T) {
			r := &road{takes: slowly("", takes)}
			onRoad(t, r, func(t *testing.T, s *Server) {
				x := newSender(s)
				x.sendMany(4, "before")
				x.send("short", 20*time.Millisecond)
				x.send("long", time.Second)
				x.send("middle", 30*time.Millisecond)
				x.send("queued", time.Millisecond)
				x.failed(t, "queued", "i/o timeout", time.Millisecond)
				x.failed(t, "short", "i/o timeout", 20*time.Millisecond)
				x.failed(t, "middle", "i/o timeout", 30*time.Millisecond)
				if takes == time.Hour {
					x.failed(t, "long", "i/o timeout", time.Second)
				} else {
					x.answered(t, "long", patience+takes)
				}
				for _, name := range []string{"queued", "short", "middle"} {
					if err := x.got[name].err; Classify(err).Kind != protocol.NoAnswer || !errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("%s: %v", name, err)
					}
				}
			})
			if want := []int{1, 1, 1, 1, 3}; !slices.Equal(r.sizes(), want) {
				t.Errorf("sent %v", r.sizes())
			}
		})
	}
}

// More commands hang than go-redis has connections for. Each fails at its own deadline.
func TestAServerThatHangsTellsEachInItsTime(t *testing.T) {
	r := &road{takes: slowly("", time.Hour)}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		for i := range 300 {
			x.send(fmt.Sprint("c", i), protocol.CommandTimeout)
			time.Sleep(time.Millisecond)
		}
		for i := range 300 {
			x.failed(t, fmt.Sprint("c", i), "i/o timeout", time.Duration(i)*time.Millisecond+protocol.CommandTimeout)
		}
	})
}

func TestACanceledCommandLeavesTheQueueAndNothingElse(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		x.send("ahead", time.Second)
		x.under(ctx, "canceled", cancel)
		x.send("behind", time.Second)
		cancel()
		x.failed(t, "canceled", "canceled", 0)
		x.answered(t, "ahead", 2*time.Millisecond)
		x.answered(t, "behind", 2*time.Millisecond)
		for i := range 4 {
			x.answered(t, fmt.Sprint("before", i), time.Millisecond)
		}
	})
	if n := len(r.sizes()); n != 5 {
		t.Errorf("%d round trips", n)
	}
}

// Its leader's context ends as well, where the client's end has canceled it.
func TestACanceledCommandStaysInABatchThatWasSent(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		x.send("leader", time.Second)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second/2)
		x.under(ctx, "canceled", cancel)
		time.Sleep(1500 * time.Microsecond) // in virtual time, until the batch is under way
		cancel()
		for _, what := range []string{"leader", "canceled"} {
			x.answered(t, what, 2*time.Millisecond)
		}
	})
}

func TestOnlyWhatTheServerDoesNotKnowIsSentAgain(t *testing.T) {
	var knows atomic.Bool
	r := &road{fails: func(trip []redis.Cmder) error {
		for _, cmd := range trip {
			switch {
			case cmd.Name() == "eval":
				knows.Store(true)
			case strings.HasPrefix(lastOf(cmd), "new") && !knows.Load():
				cmd.SetErr(replyError("NOSCRIPT No matching script"))
			}
		}
		if len(trip) > 1 {
			return nil
		}
		return trip[0].Err()
	}}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		x.sendMany(2, "new")
		x.sendMany(2, "known")
		for i := range 2 {
			x.answered(t, fmt.Sprint("known", i), 2*time.Millisecond)
		}
		first, second := "new0", "new1" // by the text, and by the hash again
		if x.got[second].at < x.got[first].at {
			first, second = second, first
		}
		x.answered(t, first, 3*time.Millisecond)
		x.answered(t, second, 4*time.Millisecond)
		if n := s.Commands(); n != 10 {
			t.Errorf("counted %d commands", n)
		}
	})
}

// replyError is an error as Redis replies it.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

func TestTheErrorOfAConnectionIsThatOfEachInTheBatch(t *testing.T) {
	r := &road{}
	r.fails = func(trip []redis.Cmder) error {
		if len(trip) > 1 {
			return errors.New("connection reset by peer")
		}
		return nil
	}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(8, "c")
		for i := range 4 {
			x.answered(t, fmt.Sprint("c", i), time.Millisecond)
			x.failed(t, fmt.Sprint("c", 4+i), "connection reset by peer", 2*time.Millisecond)
		}
	})
}

func TestTheErrorOfAHookIsThatOfACommandThatWasQueuedByItself(t *testing.T) {
	r := &road{fails: func(trip []redis.Cmder) error {
		if lastOf(trip[0]) == "queued" {
			return errors.New("the hook's error")
		}
		return nil
	}}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		x.send("queued", time.Second)
		x.failed(t, "queued", "the hook's error", 2*time.Millisecond)
	})
}

func TestTheRefusalOfOneCommandIsNotThatOfItsBatch(t *testing.T) {
	r := &road{}
	r.fails = func(trip []redis.Cmder) error {
		for i, cmd := range trip {
			if lastOf(cmd) == "refused" {
				cmd.SetErr(replyError("WRONGTYPE Operation against a key holding the wrong kind of value"))
			} else if i == len(trip)-1 {
				for _, cmd := range trip {
					if once := cmd.(onceCmd); once.Err() == nil {
						once.SetVal(lastOf(cmd))
					}
				}
			}
		}
		return trip[0].Err()
	}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		x.send("refused", time.Second)
		x.send("other", time.Second)
		x.failed(t, "refused", "WRONGTYPE", 2*time.Millisecond)
		x.answered(t, "other", 2*time.Millisecond)
	})
}

func TestTheRefusalOfOneCommandIsNotThatOfOneWithoutAReply(t *testing.T) {
	r := &road{fails: func(trip []redis.Cmder) error {
		if lastOf(trip[0]) == "refused" {
			trip[0].SetErr(replyError("WRONGTYPE Operation against a key holding the wrong kind of value"))
		}
		return trip[0].Err()
	}}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		x.send("refused", time.Second)
		x.send("other", time.Second)
		x.failed(t, "refused", "WRONGTYPE", 2*time.Millisecond)
		x.failed(t, "other", errNoReply.Error(), 2*time.Millisecond)
	})
}

func TestAPanicOfAHookIsThatOfEachInTheBatch(t *testing.T) {
	for what, ends := range map[string]func(){"panic": func() { panic("ours") }, "Goexit": runtime.Goexit} {
		t.Run(what, func(t *testing.T) {
			r := &road{}
			r.fails = func(trip []redis.Cmder) error {
				if len(trip) > 1 {
					ends()
				}
				return nil
			}
			onRoad(t, r, func(t *testing.T, s *Server) {
				x := newSender(s)
				x.sendMany(8, "c")
				x.all.Wait()
				for i := range 4 {
					o := x.got[fmt.Sprint("c", 4+i)]
					if what == "panic" && o.panicked != "ours" || what == "Goexit" && (o.panicked != nil || o.err == nil) || o.at != 2*time.Millisecond {
						t.Errorf("c%d: %+v", 4+i, o)
					}
				}
				y := newSender(s)
				y.sendMany(4, "after")
				for i := range 4 {
					y.answered(t, fmt.Sprint("after", i), time.Millisecond)
				}
			})
		})
	}
}

func TestAUsersContextIsThatOfItsOwnCommandOnly(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		k, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = s.Inspect(context.Background(), &k)
		_, _ = s.Evict(context.Background(), &k)
		if took := time.Since(x.began); took != 3*time.Millisecond { // Evict sends a PING first
			t.Errorf("Inspect and Evict took %v behind four commands", took)
		}
		x.all.Wait()
	})
	if want := []int{1, 1, 1, 1, 1, 1, 1}; !slices.Equal(r.sizes(), want) {
		t.Errorf("sent %v", r.sizes())
	}
}

// A batch of commands of several locks belongs to no span, so its context carries no command's values.
func TestABatchHasNoValuesOfOneCommand(t *testing.T) {
	type key struct{}
	var seen sync.Map
	r := &road{sees: func(ctx context.Context, n int) { seen.Store(n, ctx.Value(key{})) }}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		for i := range 8 {
			ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), key{}, "span"), time.Second)
			x.under(ctx, fmt.Sprint("c", i), cancel)
		}
		x.all.Wait()
	})
	for n, want := range map[int]any{1: "span", 4: nil} {
		if got, ok := seen.Load(n); !ok || got != want {
			t.Errorf("%d together: %v", n, got)
		}
	}
}

func TestOnlyOneNodesOwnClientShares(t *testing.T) {
	o := redistest.Options("127.0.0.1:0")
	o.ContextTimeoutEnabled = true
	node := redis.NewClient(o)
	defer node.Close()
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:0"}, ContextTimeoutEnabled: true})
	defer cluster.Close()
	for what, c := range map[string]struct {
		rdb  redis.UniversalClient
		want bool
	}{
		"a client":         {node, true},
		"its clone":        {redis.NewClient(redistest.Options("127.0.0.1:0")), true},
		"a Cluster":        {cluster, false},
		"a type of a user": {around.Node{Client: node}, false},
	} {
		s := New(c.rdb, "")
		if got := s.batches != nil; got != c.want {
			t.Errorf("%s shares: %v", what, got)
		}
		if confirmed := Replicated(s, 1, time.Second).confirming(node); confirmed.confirm == nil {
			t.Errorf("%s: a grant that replicas confirm is sent without WAIT", what)
		}
	}
}

// A command that is followed by WAIT shares its connection with nothing else, because WAIT is about that
// connection's last write.
func TestACommandThatReplicasConfirmSharesNoPipeline(t *testing.T) {
	r := &road{}
	onRoad(t, r, func(t *testing.T, s *Server) {
		x := newSender(s)
		x.sendMany(4, "before")
		confirmed := Replicated(s, 1, time.Second).confirming(s.Rdb)
		y := newSender(confirmed)
		y.send("granted", time.Second)
		x.all.Wait()
		y.all.Wait()
		if n := s.Commands(); n != 6 {
			t.Errorf("%d commands are counted", n)
		}
	})
	if want := []int{1, 1, 1, 1, 2}; !slices.Equal(r.sizes(), want) {
		t.Errorf("sent %v", r.sizes())
	}
}

// This test runs in real time, because all clients of go-redis, and so all bubbles, share the timers
// for waiting for a connection. Each command fails because the pool is exhausted, or was sent over a
// connection for pipelines.
func TestAnExhaustedPoolIsSaidToThoseThatQueue(t *testing.T) {
	t.Parallel()
	rdb := redistest.MiniClient(t, redistest.Mini(t), func(o *redis.Options) {
		o.PoolSize, o.PoolTimeout, o.ContextTimeoutEnabled = 1, time.Hour, true
	})
	conn := rdb.Conn()
	defer conn.Close()
	if err := conn.Ping(context.Background()).Err(); err != nil { // holds the only connection from now on
		t.Fatal(err)
	}
	s := New(rdb, "")
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // by then, all ten commands wait
	defer cancel()
	errs := make(chan error)
	for i := range 10 {
		go func() { // ends with ctx; the test waits for its error
			_, err := s.run(ctx, &RenewScript, []any{"key"}, fmt.Sprint(i))
			errs <- err
		}()
	}
	said := 0
	for range 10 {
		switch err := <-errs; {
		case errors.Is(err, redis.ErrPoolTimeout) && strings.Contains(err.Error(), "pool of 1 is exhausted"):
			said++
		case err == nil || IsServerReply(err): // the script's arguments are nonsense
		default:
			t.Error(err)
		}
	}
	if said < atOnce {
		t.Errorf("said to %d", said)
	}
}

// A command that its sender has given up may still be written, or be in the hands of go-redis.
func TestTheArgumentsOfACommandThatMayStillBeSentAreNotUsedAgain(t *testing.T) {
	args := func(trip []redis.Cmder) (all string) {
		for _, cmd := range trip {
			all += fmt.Sprintln(cmd.Args()...)
		}
		return all
	}
	var mu sync.Mutex // guards sent
	sent := map[redis.Cmder]string{}
	together := 0
	r := &road{
		takes: func(trip []redis.Cmder) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			sent[trip[0]] = args(trip)
			together = max(together, len(trip))
			return 50 * time.Millisecond
		},
		fails: func(trip []redis.Cmder) error {
			mu.Lock()
			defer mu.Unlock()
			if now := args(trip); now != sent[trip[0]] {
				t.Errorf("sent %q, which became %q", sent[trip[0]], now)
			}
			return nil
		},
	}
	onRoad(t, r, func(t *testing.T, s *Server) {
		s.args.spare = new(sync.Pool)
		k, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for i := range 200 {
			all.Go(func() {
				limit := time.Minute
				if i%3 == 0 {
					limit = 30 * time.Millisecond // while it is in a batch that another one leads
				}
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				_, _ = s.send(ctx, false, &ReleaseScript, s.args.release(&k, fmt.Sprint(i), 0, nil, 0))
			})
			time.Sleep(time.Millisecond)
		}
		all.Wait()
	})
	if together < 3 {
		t.Errorf("at most %d commands left together: the test proves nothing", together)
	}
}

func TestALineIsUsedAgainOnlyWhereNobodyElseSeesIt(t *testing.T) {
	rdb := redis.NewClient(redistest.Options("127.0.0.1:1"))
	defer rdb.Close()
	if New(rdb, "").args.spare == nil {
		t.Error("those of a clone, which has no hooks, are not")
	}
	o := redistest.Options("127.0.0.1:1")
	o.ContextTimeoutEnabled = true
	used := redis.NewClient(o)
	defer used.Close()
	if New(used, "").args.spare != nil {
		t.Error("those that the hooks of a user's client see are")
	}
}
