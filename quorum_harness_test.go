package leased_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// The behaviour suite on a quorum: LEASED_SERVERS=quorum has every test of it run on five
// embedded servers too. What a test does to the server, by its client, is done to all.
// Tests about the connection to one server are skipped.

// members are the servers of a quorum.
type members struct {
	minis   minis
	virtual bool

	mu    sync.Mutex                        // guards what follows
	made  map[*redis.Client][]*redis.Client // by a client of the first server: it, and those like it of the others
	wires map[string]*wires                 // by their address
}

const suiteMembers = 5

// notOnQuorum are tests that do not hold on a quorum yet, by the reason.
var notOnQuorum = map[string]string{
	"TestVirtualASubscriptionThatBreaksAllTheTimeCostsFewCommandsAndIsQuickOnceSound": "an open fault: each of five inboxes that is confirmed anew has " +
		"all locks ask all servers, which is twice the commands of a client of one server",
}

// skipOnQuorum skips those.
func skipOnQuorum(t *testing.T) {
	t.Helper()
	name, _, _ := strings.Cut(t.Name(), "/")
	if why, listed := notOnQuorum[name]; listed {
		t.Skip(why)
	}
}

// wantsQuorum reports whether LEASED_SERVERS names quorum.
func wantsQuorum() bool {
	return slices.Contains(strings.Split(os.Getenv("LEASED_SERVERS"), ","), "quorum")
}

// quorumPlace returns five embedded servers.
func quorumPlace(t *testing.T, virtual bool) place {
	t.Helper()
	prefix := ""
	if !virtual {
		prefix = redistest.Prefix(t)
	}
	m := &members{virtual: virtual, made: map[*redis.Client][]*redis.Client{}, wires: map[string]*wires{}}
	for range suiteMembers {
		if virtual {
			m.minis = append(m.minis, redistest.Mini(t))
		} else {
			m.minis = append(m.minis, redistest.MiniTCP(t))
		}
	}
	for _, mini := range m.minis { // old enough to vote
		if err := mini.Set(prefix+"leased:quorum:mark", "1"); err != nil {
			t.Fatal(err)
		}
	}
	s := place{Target: redistest.Target{Name: "quorum", Mini: m.minis[0]}, Mini: m.minis, members: m}
	if !virtual {
		s.Addr, s.Prefix = m.minis[0].Addr(), prefix
	}
	// The test's own client acts on all servers.
	rdb := m.client(t, 0)
	var others []*redis.Client
	for i := 1; i < suiteMembers; i++ {
		others = append(others, m.client(t, i))
	}
	rdb.AddHook(everywhere{others})
	s.rdb = rdb
	redistest.CheckLeaks(t, s.rdb, s.Prefix)
	return s
}

func (m *members) client(t *testing.T, i int, change ...func(*redis.Options)) *redis.Client {
	if m.virtual {
		return redistest.MiniClient(t, m.minis[i], change...)
	}
	return redistest.Target{Addr: m.minis[i].Addr()}.NewClient(t, change...)
}

// connect returns a client of the first server, and makes one like it for each other.
func (m *members) connect(t *testing.T, change []func(*redis.Options)) *redis.Client {
	t.Helper()
	var all []*redis.Client
	for i := range m.minis {
		all = append(all, m.client(t, i, append(slices.Clone(change), func(o *redis.Options) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if w := m.wires[o.Addr]; w != nil && i > 0 {
				o.Addr = w.others[i-1].Addr
			}
			if i > 0 {
				o.Limiter = nil // it counts what one server is sent
			}
		})...))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.made[all[0]] = all
	return all[0]
}

func (m *members) alike(rdb *redis.Client) []*redis.Client {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.made[rdb]
}

// addProxies gives w a proxy in front of each server but the first.
func (m *members) addProxies(t *testing.T, w *wires) {
	for _, one := range m.minis[1:] {
		w.others = append(w.others, redistest.NewProxy(t, one.Addr()))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wires[w.Addr] = w
}

// open returns a client of the library on rdb and on those like it.
func (m *members) open(t *testing.T, rdb redis.UniversalClient, opts []leased.Option) (*leased.Client, error) {
	t.Helper()
	one, _ := rdb.(*redis.Client)
	all := m.alike(one)
	if all == nil {
		t.Skip("about a Redis client of another type")
	}
	servers := make([]redis.UniversalClient, len(all))
	for i, one := range all {
		servers[i] = one
	}
	return leased.NewQuorum(servers, append([]leased.Option{leased.WithQuarantine(30 * 24 * time.Hour)}, opts...)...)
}

// settle returns when all servers say the same about a lock, or if they do not for long.
func (m *members) settle(s place, name string) {
	if m.virtual {
		synctest.Wait()
		return
	}
	queue, readers, waiters, _ := s.helperKeys(name)
	says := func(one *miniredis.Miniredis) string {
		owner, _ := one.Get(s.Prefix + name)
		if who, err := protocol.ParseID(owner); err == nil {
			owner = who.Client // the rest of its id may differ
		}
		return fmt.Sprint(owner, one.Exists(queue), one.Exists(readers), one.Exists(waiters))
	}
	for until := time.Now().Add(5 * time.Second); time.Now().Before(until); time.Sleep(time.Millisecond) { // between two looks
		first := says(m.minis[0])
		if !slices.ContainsFunc(m.minis, func(one *miniredis.Miniredis) bool { return says(one) != first }) {
			return
		}
	}
}

// queued reports whether n wait on most servers. On a few it may be otherwise: what is granted
// there alone is given back in time.
func (m *members) queued(queue string, n int64) bool {
	most := 0
	for _, one := range m.minis {
		if members, _ := one.ZMembers(queue); int64(len(members)) == n {
			most++
		}
	}
	return most > suiteMembers/2
}

// everywhere repeats the commands of the first server's client on the others, for a test that
// interferes, and makes of it one that locks as another quorum's client would.
type everywhere struct{ others []*redis.Client }

func (h everywhere) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h everywhere) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if taken, sets := cmd.(*redis.BoolCmd); sets && strings.HasPrefix(cmd.Name(), "set") {
			return h.take(ctx, taken, next)
		}
		votes := map[string]int{}
		for _, other := range h.others {
			v, _ := other.Do(ctx, cmd.Args()...).Result()
			votes[fmt.Sprint(v)]++
		}
		err := next(ctx, cmd)
		if n, does := cmd.(*redis.Cmd); does { // of a script: the answer of most servers
			votes[fmt.Sprint(n.Val())]++
			for v, times := range votes {
				if i, wrong := strconv.ParseInt(v, 10, 64); wrong == nil && times > suiteMembers/2 {
					n.SetVal(i)
				}
			}
		}
		return err
	}
}

// take sets a key where it is free. Where it is not on most servers, what was set is deleted.
func (h everywhere) take(ctx context.Context, cmd *redis.BoolCmd, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	var set []*redis.Client
	for _, other := range h.others {
		again := redis.NewBoolCmd(ctx, cmd.Args()...)
		if _ = other.Process(ctx, again); again.Val() {
			set = append(set, other)
		}
	}
	n := len(set)
	if cmd.Val() {
		n++
	}
	if n > suiteMembers/2 {
		cmd.SetVal(true)
		return err
	}
	for _, other := range set {
		other.Del(ctx, fmt.Sprint(cmd.Args()[1]))
	}
	if cmd.Val() {
		err = next(ctx, redis.NewIntCmd(ctx, "del", cmd.Args()[1]))
	}
	cmd.SetVal(false)
	return err
}

func (h everywhere) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, other := range h.others {
			for _, cmd := range cmds {
				_ = other.Do(ctx, cmd.Args()...)
			}
		}
		return next(ctx, cmds)
	}
}
