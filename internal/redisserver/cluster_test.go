package redisserver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Rule 9: all keys are passed in KEYS and share a slot. A server in cluster mode refuses a
// script that touches any other slot.
func TestAllScriptsRunInClusterMode(t *testing.T) {
	in := redistest.Server(t, "--cluster-enabled", "yes")
	plain := in.Client()
	if err := plain.ClusterAddSlotsRange(context.Background(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	clusterReady(t, plain)
	redistest.CheckLeaks(t, plain, "")
	for _, name := range []string{"plain", "with spaces", "{tag}", "a{tag}b", "{user:1}:cart{", "prefix:ü", ":"} {
		s := newScene(t, plain, "", name)
		a, b, c, r, q := s.writer("A"), s.writer("B"), s.writer("A"), s.reader("C"), s.reader("D")
		s.gets(s.acquire(a))
		s.waits(s.acquire(b), 0)
		s.is(s.yield(a, c, 1), protocol.Enqueued)
		s.owned(b)
		if !s.renew(b) {
			t.Errorf("%q: not renewed", name)
		}
		s.is(s.release(b, s.look().token()+1), protocol.Done)
		s.cancel(c, 0)
		s.gets(s.acquire(r))
		s.gets(s.try(q))
		if !s.renew(r) {
			t.Errorf("%q: reader not renewed", name)
		}
		if snap, err := s.srv.Inspect(context.Background(), &s.keys); err != nil || snap.Value != protocol.MarkerValue || len(snap.Readers) != 4 {
			t.Errorf("%q: %+v, %v", name, snap, err)
		}
		s.evict()
		s.owned()
		d := s.writer("D")
		s.gets(s.acquire(d))
		s.gets(s.downgrade(d, s.reader("D"), 0))
		s.evict()
	}
}

// A Cluster's client asks a random node for its table of commands when it is told nothing about a
// command's keys, and waits for that node whatever the command's context says.
func TestAClustersClientSendsNothingBesideTheScript(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		node := redis.ClusterNode{Addr: s.rdb.Options().Addr}
		cluster := redis.NewClusterClient(&redis.ClusterOptions{
			ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
				return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{node}}}, nil
			},
			NewClient: func(*redis.Options) *redis.Client { return redis.NewClient(s.rdb.Options()) },
		})
		defer cluster.Close()
		var sent redistest.Counter
		cluster.OnNewNode(func(n *redis.Client) { n.AddHook(&sent) })
		s.srv = New(cluster, "")
		a := s.writer("A")
		s.gets(s.acquire(a))
		s.is(s.release(a, 0), protocol.Done)
		for name, n := range sent.Commands() {
			if name != "evalsha" && name != "eval" && name != "cluster" {
				t.Errorf("%d %s", n, name)
			}
		}
		if sent.Commands()["evalsha"] != 2 {
			t.Errorf("sent %v", sent.Commands())
		}
	})
}

// clusterReady polls until a cluster of one node is up, since there is no event to wait for.
func clusterReady(t *testing.T, rdb *redis.Client) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) { // between two polls
		info, err := rdb.ClusterInfo(context.Background()).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("no cluster: %v\n%s", err, info)
		}
	}
}

// While a slot is migrated, a script that names several of its keys fails with TRYAGAIN if one of
// them is missing, so a writer's renewal names a single key.
func TestAWritersRenewalNamesOneKeyAndAReadersTwo(t *testing.T) {
	server := redistest.MiniTCP(t)
	named := &sentKeys{}
	s := newScene(t, clientOf(t, server.Addr()), "", "x")
	s.srv.Rdb.AddHook(named)
	for m, want := range map[protocol.Mode][]string{protocol.Exclusive: {"x"}, protocol.Shared: {"x", s.keys.Readers()}} {
		id := s.id("A", m, long)
		s.gets(s.acquire(id))
		if !s.renew(id) {
			t.Errorf("%v: not renewed", m)
		}
		if !slices.Equal(named.last, want) {
			t.Errorf("%v: renewal names %q, want %q", m, named.last, want)
		}
		s.release(id, 0)
	}
}

// sentKeys is a hook that records the keys of the last script in a pipeline.
type sentKeys struct{ last []string }

func (*sentKeys) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (*sentKeys) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (k *sentKeys) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			args := cmd.Args()
			n, _ := args[2].(int)
			k.last = nil
			for _, key := range args[3 : 3+n] {
				k.last = append(k.last, fmt.Sprint(key))
			}
		}
		return next(ctx, cmds)
	}
}
