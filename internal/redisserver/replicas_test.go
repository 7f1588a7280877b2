package redisserver

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// pool is a client of one node, of a type of the user's, that nothing is sent through.
type pool struct {
	redis.UniversalClient
	options redis.Options
	stats   redis.PoolStats
}

func (p *pool) Options() *redis.Options     { return &p.options }
func (p *pool) PoolStats() *redis.PoolStats { return &p.stats }

// newOf makes a value of a type that go-redis does not export.
func newOf[T any](*T) *T { return new(T) }

func TestHalfOfAPoolMayWaitForReplicas(t *testing.T) {
	for name, c := range map[string]struct {
		rdb  redis.UniversalClient
		most int
	}{
		"one connection": {&pool{options: redis.Options{PoolSize: 1}}, 1},
		"nine":           {&pool{options: redis.Options{PoolSize: 9}}, 4},
		"few at once":    {&pool{options: redis.Options{PoolSize: 9, MaxActiveConns: 6}}, 3},
		"pipelines have their own": {&pool{options: redis.Options{PoolSize: 100, PipelinePoolSize: 6},
			stats: redis.PoolStats{PipelineStats: newOf(redis.PoolStats{}.PipelineStats)}}, 3},
		"of the default number": {&pool{options: redis.Options{PoolSize: 100},
			stats: redis.PoolStats{PipelineStats: newOf(redis.PoolStats{}.PipelineStats)}}, 5},
	} {
		synctest.Test(t, func(t *testing.T) {
			all := turns{of: map[*redis.Client]*turn{}}
			const least = 1500 * time.Millisecond
			take := func() (func(), error) {
				ctx, cancel := context.WithTimeout(t.Context(), protocol.CommandTimeout)
				t.Cleanup(cancel)
				return all.take(ctx, DeploymentOf(c.rdb), least)
			}
			var taken []func()
			for range c.most {
				done, err := take()
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				taken = append(taken, done)
			}
			began := time.Now()
			_, err := take()
			if f := Classify(err); f == nil || f.Kind != protocol.RefusedNow || time.Since(began) != protocol.CommandTimeout-least {
				t.Errorf("%s: one more gets %v after %v", name, err, time.Since(began))
			}
			time.AfterFunc(100*time.Millisecond, taken[0])
			began = time.Now()
			done, err := take()
			if err != nil || time.Since(began) != 100*time.Millisecond {
				t.Errorf("%s: one more gets %v after %v", name, err, time.Since(began))
			}
			for _, each := range append(taken[1:], done) {
				each()
			}
			synctest.Wait() // the first gives its turn before it leaves
			if len(all.of) > 0 {
				t.Errorf("%s: %d are left", name, len(all.of))
			}
		})
	}
}

// A hook can keep a command forever. Its turn ends with its time.
func TestACommandThatAHookKeepsHasItsTurnForItsTimeOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := turns{of: map[*redis.Client]*turn{}}
		ctx, cancel := context.WithTimeout(t.Context(), protocol.CommandTimeout)
		defer cancel()
		done, err := all.take(ctx, DeploymentOf(&pool{options: redis.Options{PoolSize: 2}}), 0)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		later, stop := context.WithTimeout(t.Context(), 2*protocol.CommandTimeout)
		defer stop()
		next, err := all.take(later, DeploymentOf(&pool{options: redis.Options{PoolSize: 2}}), 0)
		if err != nil || time.Since(began) != protocol.CommandTimeout {
			t.Fatalf("the next has its turn after %v: %v", time.Since(began), err)
		}
		done() // at last, which takes away no other's turn
		if n := len(all.of[nil].taken); n != 1 {
			t.Errorf("%d have their turn", n)
		}
		next()
		if len(all.of) > 0 {
			t.Errorf("%d are left", len(all.of))
		}
	})
}

// The scripts that a server did not know are sent once more, maybe on another connection, whose WAIT says nothing of
// what the first has written. A WAIT without an answer belongs to commands that are repeated.
func TestEachRoundTripNeedsItsReplicas(t *testing.T) {
	node := redis.NewClient(&redis.Options{Addr: "127.0.0.1:0"})
	defer node.Close()
	onServer := Replicated(New(node, ""), 2, time.Second)
	type answer struct {
		counted int64
		err     error
	}
	enough, few, none := answer{counted: 2}, answer{counted: 1}, answer{err: io.EOF}
	for _, x := range []struct {
		answers []answer
		confirm bool
		waits   int64 // for how long the last WAIT does, in ms
	}{
		{[]answer{enough}, true, 1000},
		{[]answer{few}, false, 1000},
		{[]answer{enough, enough}, true, 1000},
		{[]answer{enough, few}, false, 1000},
		{[]answer{few, enough}, false, 1},
		{[]answer{none, enough}, true, 1000},
		{[]answer{few, none, enough}, false, 1},
	} {
		s := onServer.confirming(node)
		for _, a := range x.answers {
			s.confirm.next(t.Context())
			s.confirm.wait.SetVal(a.counted)
			s.confirm.wait.SetErr(a.err)
		}
		if err := s.counted(); (err == nil) != x.confirm || !x.confirm && !errors.Is(err, protocol.ErrNoReplicas) {
			t.Errorf("%v: %v", x.answers, err)
		}
		if waits := s.confirm.wait.Args()[2]; waits != x.waits {
			t.Errorf("%v: the last one waits %v ms", x.answers, waits)
		}
	}
}

// No replica has anything here. A yield may have made its new request an owner, which the acquire that follows confirms.
func TestWhatMakesNobodyAnOwnerNeedsNoReplicas(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		r := Replicated(s.srv, 1, time.Millisecond)
		owner, next, other := s.writer("a"), s.writer("a"), s.writer("b")
		s.gets(s.acquire(owner))
		c := s.acquireOf(other)
		s.waits(s.must(r.Do(t.Context(), &s.keys, &c)), 0)
		s.cancel(other, 0)
		a := s.must(r.Do(t.Context(), &s.keys, &protocol.Command{Verb: protocol.Yield, ID: owner, Next: next}))
		token := s.look().token()
		a.Clock = min(a.Clock, 1)
		if want := (protocol.Answer{Outcome: protocol.Enqueued, Token: token - 1, Clock: 1, Left: protocol.Ownerless, Unfinished: true}); a != want {
			t.Errorf("the yield is answered\n%+v, not\n%+v", a, want)
		}
		s.owned(next)
		a = s.must(r.Do(t.Context(), &s.keys, &protocol.Command{Verb: protocol.Yield, ID: owner, Next: s.writer("a")}))
		s.is(a, protocol.NotOurs)
		s.is(s.must(r.Do(t.Context(), &s.keys, &protocol.Command{Verb: protocol.Release, ID: next})), protocol.Done)
	})
}

// What is in use already is not canceled for lack of replicas.
func TestOnlyAGrantThatIsNewIsCanceledForLackOfReplicas(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		r := Replicated(s.srv, 1, time.Millisecond)
		owner, reader := s.writer("a"), s.reader("a")
		for _, x := range []struct {
			what     string
			c        protocol.Command
			canceled bool
		}{
			{"a grant", s.acquireOf(owner), true},
			{"a question", s.questionOf(owner), false},
			{"a downgrade", protocol.Command{Verb: protocol.Downgrade, ID: owner, Next: reader}, false},
		} {
			a, err := r.Do(t.Context(), &s.keys, &x.c)
			if fail := Classify(err); !errors.Is(err, protocol.ErrNoReplicas) || fail.LacksReplicas != x.canceled || a != (protocol.Answer{}) {
				t.Errorf("%s: %+v, %v, to be canceled: %v", x.what, a, err, fail != nil && fail.LacksReplicas)
			}
		}
		batch := make([]protocol.Renewal, 2)
		for i, id := range []string{reader, s.writer("b")} {
			req, err := protocol.RequestOf(id)
			if err != nil {
				t.Fatal(err)
			}
			batch[i] = protocol.Renewal{Keys: &s.keys, Req: req}
		}
		r.Renew(t.Context(), batch)
		if owned := batch[0]; owned.Outcome != protocol.Unanswered || !errors.Is(owned.Err, protocol.ErrNoReplicas) {
			t.Errorf("the renewal of the owner: %v, %v", owned.Outcome, owned.Err)
		}
		if other := batch[1]; other.Outcome != protocol.NotOurs || other.Err != nil {
			t.Errorf("the renewal of another request: %v, %v", other.Outcome, other.Err)
		}
	})
}

// nowhere are the masters of a Cluster that is not reached.
type nowhere struct{}

func (nowhere) MasterForKey(context.Context, string) (*redis.Client, error) { return nil, io.EOF }

func TestWhereNoNodeIsFoundThatIsTheErrorOfAGrantAndOfARenewal(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:0"})
	defer rdb.Close()
	s := New(rdb, "")
	s.Masters = nowhere{}
	r := Replicated(s, 1, time.Second)
	var k protocol.Keys
	if _, err := r.Do(t.Context(), &k, &protocol.Command{Verb: protocol.Acquire}); !errors.Is(err, io.EOF) {
		t.Errorf("the error of a grant is %v", err)
	}
	batch := []protocol.Renewal{{Keys: &k}, {Keys: &k}}
	r.Renew(t.Context(), batch)
	for _, one := range batch {
		if one.Outcome != protocol.Unanswered || !errors.Is(one.Err, io.EOF) {
			t.Errorf("a renewal: %v, %v", one.Outcome, one.Err)
		}
	}
}

// A lock has one command under way, so its release would wait for the turn.
func TestAnOwnersQuestionAndItsDowngradeWaitForNoTurn(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		r := Replicated(s.srv, 1, time.Millisecond)
		owner := s.writer("a")
		s.acquire(owner)
		for range pipelineConns(r.Rdb, s.rdb.Options()) / 2 {
			done, err := r.turns.take(t.Context(), r.Deployment, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer done()
		}
		for what, c := range map[string]protocol.Command{
			"a question":  s.questionOf(owner),
			"a downgrade": {Verb: protocol.Downgrade, ID: owner, Next: s.reader("a")},
			"a grant":     s.acquireOf(s.writer("b")),
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // too little to wait for a turn
			_, err := r.Do(ctx, &s.keys, &c)
			cancel()
			if waits := errors.As(err, new(*noTurn)); waits != (what == "a grant") {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
}
