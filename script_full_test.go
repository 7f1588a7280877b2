package leased

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// These need what only a real server has: a memory limit, ACLs, cluster mode.

// fill leaves the server no memory for anything that a full one refuses.
func (s *scene) fill() { s.raw("CONFIG", "SET", "maxmemory", "1") }
func (s *scene) room() { s.raw("CONFIG", "SET", "maxmemory", "0") }

// Rule 12: what gives something back, or keeps what one has, needs no memory.
func TestAFullServerCarriesOutWhatGivesBackOrKeeps(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		// Each case sets the scene with room and then acts without; the ids are
		// an owner of each mode, a waiter, and a fresh one.
		for _, m := range []mode{exclusive, shared} {
			cases := map[string]func(owner, waiter, fresh string){
				"release": func(owner, waiter, _ string) {
					s.is(s.release(owner, 0), done)
					s.owned(waiter)
				},
				"release with a token": func(owner, waiter, _ string) {
					used := s.look().token() + 3_600_000_000
					s.is(s.release(owner, used), done)
					s.owned(waiter)
					if token := s.look().token(); token != used+1 {
						t.Errorf("token %d after %d", token, used)
					}
				},
				"yield": func(owner, waiter, fresh string) {
					s.is(s.yield(owner, fresh, 0), enqueued)
					s.owned(waiter)
					s.queued(fresh)
				},
				"cancel of the owner": func(owner, waiter, _ string) {
					s.cancel(owner, 0)
					s.owned(waiter)
				},
				"cancel of the waiter": func(owner, waiter, _ string) {
					s.cancel(waiter, 0)
					s.owned(owner)
					s.queued()
				},
				"evict": func(_, waiter, _ string) {
					s.evict()
					s.owned(waiter)
				},
				"renew": func(owner, _, _ string) {
					if !s.renew(owner) {
						t.Error("not renewed")
					}
				},
				"acquire by the owner": func(owner, _, _ string) { s.gets(s.acquire(owner)) },
				"acquire by the waiter": func(_, waiter, _ string) {
					s.room()
					s.raw("ZADD", s.keys.waiters(), "XX", s.now()+5000, waiter)
					s.fill()
					s.waits(s.acquire(waiter), 0)
					if st := s.look(); st.left(st.waiters[waiter]) < 20_000 {
						t.Errorf("the lease was not refreshed: %d ms", st.left(st.waiters[waiter]))
					}
				},
				"acquire by the waiter whose turn it is": func(_, waiter, _ string) {
					s.raw("DEL", s.keys.lock, s.keys.readers())
					s.gets(s.acquire(waiter))
					s.owned(waiter)
				},
				"late copy of yield": func(owner, waiter, fresh string) {
					s.room()
					s.yield(owner, fresh, 0)
					s.fill()
					s.is(s.yield(owner, fresh, 0), enqueued)
					s.owned(waiter)
				},
			}
			for what, act := range cases {
				t.Run(fmt.Sprintf("%v/%s", m, what), func(t *testing.T) {
					s.t = t
					s.room()
					s.clear()
					owner, waiter, fresh := s.id("A", m, long), s.writer("B"), s.id("A", m, long)
					s.gets(s.acquire(owner))
					s.waits(s.acquire(waiter), 0)
					s.fill()
					act(owner, waiter, fresh)
				})
			}
		}
		s.t = t
		s.room()
	})
}

// Rule 12 beside a reader with a longer TTL, when no expiry has to be moved
// before the score.
func TestAFullServerExtendsAShortReaderBesideALongOne(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		patient, brief := s.id("A", shared, 2*long), s.id("B", shared, long)
		s.gets(s.acquire(patient))
		s.gets(s.acquire(brief))
		s.fill()
		defer s.room()
		if !s.renew(brief) {
			t.Error("not renewed")
		}
		if a, err := s.do(s.acquireOf(brief)); err != nil || a.outcome != granted {
			t.Errorf("asked again: %+v, %v", a, err)
		}
		s.owned(patient, brief)
	})
}

// What needs memory fails whole.
func TestAFullServerRefusesANewOwnerAndANewWaiterAndKeepsNothingOfThem(t *testing.T) {
	onOwnServer(t, func(t *testing.T, s *scene) {
		owner := s.writer("A")
		for _, taken := range []bool{false, true} {
			for _, m := range []mode{exclusive, shared} {
				s.room()
				s.clear()
				if taken {
					s.gets(s.acquire(owner))
				}
				before := s.look()
				s.fill()
				if a, err := s.do(s.acquireOf(s.id("B", m, long))); err == nil || !strings.Contains(err.Error(), "OOM") {
					t.Errorf("%v, taken %v: %+v, %v", m, taken, a, err)
				}
				if after := s.look(); after.shape(&ranks{}) != before.shape(&ranks{}) {
					t.Errorf("%v, taken %v: left\n%s", m, taken, after.shape(&ranks{}))
				}
			}
		}
		s.room()
	})
}

// P1: denied is an error and no count. The waiter stays owner and finds out by
// asking. Nor is it proof where it is denied to ask who listens.
func TestADeniedPublishIsNoProofThatTheWaiterIsGone(t *testing.T) {
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	if err := admin.Do(context.Background(), "ACL", "SETUSER", "mute", "on", ">pass", "~*", "resetchannels", "+@all").Err(); err != nil {
		t.Fatal(err)
	}
	s := newScene(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "mute", "pass" }), "", "x")
	newScene(t, admin, "", "x").listen("B")
	for _, m := range []mode{exclusive, shared} {
		owner, next, last := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
		s.gets(s.acquire(owner))
		c := s.acquireOf(next)
		c.echo = "nonce"
		if a := s.must(s.do(c)); a.echo != echoDenied {
			t.Errorf("%v: an echo that is denied says %d", m, a.echo)
		}
		if a := s.acquire(last); a.echo != echoDenied { // wanted was denied
			t.Errorf("%v: a denied wanted says %d", m, a.echo)
		}
		if a := s.release(owner, 0); a.handed != 1 {
			t.Errorf("%v: %d were made owner", m, a.handed)
		}
		s.owned(next)
		s.queued(last)
		s.gets(s.acquire(next))
		if owners := s.evict(); !slices.Equal(owners, []string{next}) {
			t.Errorf("%v: evicted %q", m, owners)
		}
		s.owned(last)
		s.clear()
	}
	owner, behind, mine := s.writer("A"), counted(s.reader("B")), s.reader("A")
	s.gets(s.acquire(owner))
	s.waits(s.acquire(behind), 0)
	s.gets(s.downgrade(owner, mine, 0))
	s.owned(mine, behind)
	s.clear()
}

func TestWhereNobodyMayAskWhoListensAWaiterIsNotTakenForGone(t *testing.T) {
	in := redistest.Server(t)
	admin := in.Client()
	redistest.CheckLeaks(t, admin, "")
	if err := admin.Do(context.Background(), "ACL", "SETUSER", "deaf", "on", ">pass", "~*", "&*", "+@all", "-pubsub").Err(); err != nil {
		t.Fatal(err)
	}
	s := newScene(t, in.Client(func(o *redis.Options) { o.Username, o.Password = "deaf", "pass" }), "", "x")
	for _, m := range []mode{exclusive, shared} {
		owner, next, last := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
		s.gets(s.acquire(owner))
		s.waits(s.acquire(next), 0)
		s.waits(s.acquire(last), 1)
		if a := s.release(owner, 0); a.handed != 1 {
			t.Errorf("%v: %d were made owner", m, a.handed)
		}
		s.owned(next)
		s.queued(last)
		s.clear()
	}
}

// Rule 9: all keys go through KEYS and share a slot. A server in cluster mode
// refuses a script that touches another slot than its keys'.
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
		s.is(s.yield(a, c, 1), enqueued)
		s.owned(b)
		if !s.renew(b) {
			t.Errorf("%q: not renewed", name)
		}
		s.is(s.release(b, s.look().token()+1), done)
		s.cancel(c, 0)
		s.gets(s.acquire(r))
		s.gets(s.try(q))
		if !s.renew(r) {
			t.Errorf("%q: reader not renewed", name)
		}
		if snap, err := s.srv.inspect(context.Background(), &s.keys); err != nil || snap.value != markerValue || len(snap.readers) != 4 {
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

// clusterReady polls: nothing tells when a cluster of one has found itself whole.
func clusterReady(t *testing.T, rdb *redis.Client) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		info, err := rdb.ClusterInfo(context.Background()).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("no cluster: %v\n%s", err, info)
		}
	}
}

// A slot in migration answers TRYAGAIN to scripts with several keys of which one
// is missing; a writer's renewal names one.
func TestAWritersRenewalNamesOneKeyAndAReadersTwo(t *testing.T) {
	server := redistest.MiniTCP(t)
	named := &sentKeys{}
	s := newScene(t, clientOf(t, server.Addr()), "", "x")
	s.srv.rdb.AddHook(named)
	for m, want := range map[mode][]string{exclusive: {"x"}, shared: {"x", s.keys.readers()}} {
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

// sentKeys remembers what the last script of a pipeline named.
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
