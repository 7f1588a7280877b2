package redisserver

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"runtime"
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

// freshServer is a hook that stands in for a server that does not know a script until it was sent its text. A round
// trip takes a millisecond. Its time is that of the test's bubble.
type freshServer struct {
	load func(n int) error // what happens to the nth text; nil: it takes 10 ms, and the server learns

	mu    sync.Mutex // guards what follows
	texts int
	knows map[any]bool // by the hash
}

func (h *freshServer) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *freshServer) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		time.Sleep(time.Millisecond) // of virtual time
		return h.run(cmd)
	}
}

func (h *freshServer) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(_ context.Context, cmds []redis.Cmder) (first error) {
		time.Sleep(time.Millisecond) // of virtual time
		for _, cmd := range cmds {
			err := h.run(cmd)
			cmd.SetErr(err)
			if first == nil {
				first = err
			}
		}
		return first
	}
}

func (h *freshServer) run(cmd redis.Cmder) error {
	hash := cmd.Args()[1]
	if cmd.Name() == "eval" {
		h.mu.Lock()
		h.texts++
		n := h.texts
		h.mu.Unlock()
		if h.load == nil {
			time.Sleep(10 * time.Millisecond) // of virtual time
		} else if err := h.load(n); err != nil {
			return err
		}
		hash = hashOfText(hash)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case cmd.Name() == "eval":
		h.knows[hash] = true
	case !h.knows[hash]:
		return replyError("NOSCRIPT No matching script. Please use EVAL.")
	}
	cmd.(onceCmd).SetVal(int64(1))
	return nil
}

func hashOfText(text any) any {
	for _, script := range []*Script{&RenewScript, &RenewSharedScript, &ReleaseScript} {
		if script.Text == text {
			return script.Sha
		}
	}
	return nil
}

// forget has the server know nothing, as after SCRIPT FLUSH.
func (h *freshServer) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.texts, h.knows = 0, map[any]bool{}
}

func onFreshServer(t *testing.T, h *freshServer, f func(t *testing.T, s *Server)) {
	t.Helper()
	h.forget()
	synctest.Test(t, func(t *testing.T) {
		o := redistest.Options("127.0.0.1:0")
		o.ContextTimeoutEnabled = true // so that the client itself is used, with its hook
		rdb := redis.NewClient(o)
		defer rdb.Close()
		rdb.AddHook(h)
		f(t, New(rdb, ""))
	})
}

// releaseMany sends n releases at once, and returns the errors of those that failed and how long they took.
func releaseMany(s *Server, n int, limit time.Duration) (failed []error, took time.Duration) {
	began := time.Now()
	ctx, stop := context.WithTimeout(context.Background(), limit)
	defer stop()
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			errs[i] = errors.New("its goroutine was ended")
			defer func() {
				if p := recover(); p != nil {
					errs[i] = fmt.Errorf("panic: %v", p)
				}
			}()
			_, errs[i] = s.run(ctx, &ReleaseScript, []any{fmt.Sprint("lock", i)}, "id")
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			failed = append(failed, err)
		}
	}
	return failed, time.Since(began)
}

// A command that was in the same pipeline as the text, before it, does not know that the text was sent.
func TestFewOfManyCommandsSendTheTextOfAScript(t *testing.T) {
	h := &freshServer{}
	onFreshServer(t, h, func(t *testing.T, s *Server) {
		for range 2 {
			failed, took := releaseMany(s, 1000, protocol.CommandTimeout)
			if len(failed) > 0 || h.texts > 2 {
				t.Errorf("the text was sent %d times, in %v; failed: %v", h.texts, took, failed)
			}
			h.forget()
		}
		if n := len(s.loads.underWay); n != 0 {
			t.Errorf("%d texts are still on their way", n)
		}
	})
}

// Whoever waits for the text of another command must not depend on it.
func TestATextThatIsNotSentHasAnotherCommandSendIt(t *testing.T) {
	for name, c := range map[string]struct {
		first func() error
		fails int // how many commands share its fate
		takes time.Duration
	}{
		"a hook panics":             {func() error { panic("a hook") }, 1, 50 * time.Millisecond},
		"a hook ends its goroutine": {func() error { runtime.Goexit(); return nil }, 1, 50 * time.Millisecond},
		"it is refused":             {func() error { return replyError("LOADING Redis is loading the dataset in memory") }, 1, 50 * time.Millisecond},
		"its connection hangs": {func() error {
			time.Sleep(protocol.CommandTimeout) // of virtual time
			return context.DeadlineExceeded
		}, 1, protocol.CommandTimeout + 50*time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			h := &freshServer{load: func(n int) error {
				if n == 1 {
					return c.first()
				}
				return nil
			}}
			onFreshServer(t, h, func(t *testing.T, s *Server) {
				s.batches = nil // a batch shares the fate of its leader
				failed, took := releaseMany(s, 100, protocol.CommandTimeout)
				if len(failed) != c.fails || took > c.takes || h.texts != 2 {
					t.Errorf("the text was sent %d times, in %v; failed: %v", h.texts, took, failed)
				}
				if n := len(s.loads.underWay); n != 0 {
					t.Errorf("%d texts are still on their way", n)
				}
			})
		})
	}
}

func TestACommandWaitsForTheTextOfAnotherOneForAPartOfItsTime(t *testing.T) {
	for limit, wait := range map[time.Duration]time.Duration{
		loadWait / 2:            loadWait / 2 / loadShare,
		protocol.CommandTimeout: loadWait,
	} {
		var hangs atomic.Bool
		hangs.Store(true)
		h := &freshServer{load: func(int) error {
			if hangs.CompareAndSwap(true, false) {
				time.Sleep(time.Minute) // of virtual time
			}
			return nil
		}}
		onFreshServer(t, h, func(t *testing.T, s *Server) {
			s.batches = nil
			var first sync.WaitGroup
			first.Go(func() { releaseMany(s, 1, time.Hour) })
			synctest.Wait()
			time.Sleep(2 * time.Millisecond) // of virtual time
			failed, took := releaseMany(s, 100, limit)
			if len(failed) > 0 || took > wait+5*time.Millisecond || h.texts != 2 {
				t.Errorf("of %v: the text was sent %d times, in %v; failed: %v", limit, h.texts, took, failed)
			}
			first.Wait()
		})
	}
}

func TestATextThatArrivesLateServesAllTheSame(t *testing.T) {
	const late = loadWait + 100*time.Millisecond
	h := &freshServer{load: func(int) error {
		time.Sleep(late) // of virtual time
		return nil
	}}
	onFreshServer(t, h, func(t *testing.T, s *Server) {
		s.batches = nil
		failed, took := releaseMany(s, 100, protocol.CommandTimeout)
		if len(failed) > 0 || took > loadWait+late+5*time.Millisecond || h.texts != 2 {
			t.Errorf("the text was sent %d times, in %v; failed: %v", h.texts, took, failed)
		}
	})
}

// A proxy may ask another server each time, and a server may be short of memory for scripts.
func TestCommandsToAServerThatLearnsNothingAreSentByTheText(t *testing.T) {
	h := &freshServer{}
	h.load = func(int) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.knows = nil
		return replyError("ERR the text was seen")
	}
	onFreshServer(t, h, func(t *testing.T, s *Server) {
		s.batches = nil
		failed, took := releaseMany(s, 20, protocol.CommandTimeout)
		if len(failed) != 20 || h.texts != 20 || took > 50*time.Millisecond {
			t.Errorf("the text was sent %d times, in %v; answered: %v", h.texts, took, failed)
		}
		for _, err := range failed {
			if !IsServerReply(err) || unknownScript(err) {
				t.Errorf("a command ends with %v", err)
			}
		}
		h.forget()
		batch := renewals(t, 6)
		s.Renew(t.Context(), batch)
		for _, r := range batch {
			if !IsServerReply(r.Err) || unknownScript(r.Err) {
				t.Errorf("a renewal ends with %v", r.Err)
			}
		}
	})
}

// renewals returns a batch of grants, of which every third is one of readers.
func renewals(t *testing.T, n int) []protocol.Renewal {
	t.Helper()
	var batch []protocol.Renewal
	for i := range n {
		keys, err := protocol.NewKeys("", fmt.Sprint("lock", i))
		if err != nil {
			t.Fatal(err)
		}
		mode := protocol.Exclusive
		if i%3 == 0 {
			mode = protocol.Shared
		}
		batch = append(batch, protocol.Renewal{Keys: &keys, Req: protocol.Request{ID: "a", Mode: mode, TTL: time.Minute}})
	}
	return batch
}

func TestABatchSendsTheTextOfEachScriptOnce(t *testing.T) {
	h := &freshServer{load: func(int) error { return nil }}
	onFreshServer(t, h, func(t *testing.T, s *Server) {
		began := time.Now()
		batch := renewals(t, 50)
		s.Renew(t.Context(), batch)
		if took := time.Since(began); h.texts != 2 || took != 2*time.Millisecond {
			t.Errorf("%d texts were sent, in %v", h.texts, took)
		}
		for _, r := range batch {
			if r.Outcome != protocol.Granted {
				t.Errorf("not renewed: %v", r.Err)
			}
		}
	})
}

// The nodes of a Cluster know different scripts, and what a type of the user's does with a command is unknown.
func TestCommandsToDifferentNodesShareNoText(t *testing.T) {
	var masters [2]*redis.Client
	for i, addr := range []string{"127.0.0.1:2", "127.0.0.1:3"} {
		masters[i] = redis.NewClient(&redis.Options{Addr: addr})
		defer masters[i].Close()
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer cluster.Close()
	lost := errors.New("no master")
	s := New(around.Cluster{ClusterClient: cluster, Master: func(key string) (*redis.Client, error) {
		if key == "lost" {
			return nil, lost
		}
		h := fnv.New32()
		_, _ = h.Write([]byte(key))
		return masters[h.Sum32()%2], nil
	}}, "")
	seen := map[scriptLoad]bool{}
	for i := range 20 {
		of, known := s.loadOf(t.Context(), &ReleaseScript, lineOf([]any{fmt.Sprint("lock", i)}, "id"))
		seen[of] = true
		if !known {
			t.Error("the node is not known")
		}
	}
	if len(seen) != 2 {
		t.Errorf("%d texts for two nodes: %v", len(seen), seen)
	}
	if _, known := s.loadOf(t.Context(), &ReleaseScript, lineOf([]any{"lost"}, "id")); known {
		t.Error("a node without a master is known")
	}
	confirmed := *s
	confirmed.confirm = &confirmation{}
	if _, known := confirmed.loadOf(t.Context(), &ReleaseScript, lineOf([]any{"lock"}, "id")); known {
		t.Error("others would wait for the replicas as well")
	}
	other := New(around.Any{UniversalClient: cluster}, "")
	if _, known := other.loadOf(t.Context(), &ReleaseScript, lineOf([]any{"x"}, "id")); known {
		t.Error("the node of an unknown type is known")
	}
}
