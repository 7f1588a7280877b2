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
	"github.com/leasedmutex/leased/internal/redistest"
)

// The behavior suite on a quorum: LEASED_SERVERS=quorum has every test of it run on five
// embedded servers too. What a test does to the server, by its client, is done to all.
// Tests about the connection to one server are skipped.

// members are the servers of a quorum.
type members struct {
	minis   []*miniredis.Miniredis
	virtual bool

	mu      sync.Mutex                        // guards what follows
	made    map[*redis.Client][]*redis.Client // by a client of the first server: it, and those like it of the others
	wires   map[string]*wires                 // by their address
	clients []*leased.Client                  // of the library
}

const suiteMembers = 5

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
	s := place{Target: redistest.Target{Name: "quorum", Mini: m.minis[0]}, Mini: minis{m.minis, m.settle}, members: m}
	if !virtual {
		s.Addr, s.Prefix = m.minis[0].Addr(), prefix
	}
	// The test's own client acts on all servers.
	rdb := m.client(t, 0)
	var others []*redis.Client
	for i := 1; i < suiteMembers; i++ {
		others = append(others, m.client(t, i))
	}
	rdb.AddHook(everywhere{others, m.settle})
	s.rdb = rdb
	redistest.CheckLeaks(t, s.rdb, s.Prefix)
	return s
}

// listen returns how many inboxes there are on the server that has the most.
func (m *members) listen() (most int) {
	for _, mini := range m.minis {
		most = max(most, len(mini.PubSubChannels("*")))
	}
	return most
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
	c, err := leased.NewQuorum(servers, append([]leased.Option{leased.WithQuarantine(30 * 24 * time.Hour)}, opts...)...)
	if err == nil {
		m.mu.Lock()
		m.clients = append(m.clients, c)
		m.mu.Unlock()
	}
	return c, err
}

// settle returns when nothing that the clients have sent is under way, so that what a test does
// next concerns what all servers have. It does not wait for servers that do not answer, nor for
// clients that have something under way all the time.
func (m *members) settle() {
	if m.virtual {
		defer func() { _ = recover() }() // another goroutine waits, or this one is of no bubble
		synctest.Wait()
		return
	}
	m.mu.Lock()
	clients := slices.Clone(m.clients)
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for range 3 { // for an answer may have a command follow, to a server that was seen at rest
		for _, c := range clients {
			leased.Drain(ctx, c)
		}
	}
}

// held returns what stands in a key, by the server, where it is of the client that most servers have
// as the lock's owner. It returns nothing if there is no such client.
func (m *members) held(key string) map[*miniredis.Miniredis]string {
	owners := map[string]map[*miniredis.Miniredis]string{}
	for _, one := range m.minis {
		v, _ := one.Get(key)
		parts := strings.SplitN(v, ":", 6)
		client := parts[len(parts)-1]
		if owners[client] == nil {
			owners[client] = map[*miniredis.Miniredis]string{}
		}
		owners[client][one] = v
	}
	delete(owners, "")
	for _, held := range owners {
		if len(held) > suiteMembers/2 {
			return held
		}
	}
	return nil
}

// value returns what stands in a key on one of the servers, "" if most have nothing there of one
// client.
func (m *members) value(key string) string {
	for _, v := range m.held(key) {
		return v
	}
	return ""
}

// unchanged is place.unchanged, for the servers on which the next owner has the lock.
func (m *members) unchanged(t *testing.T, key string) func() {
	t.Helper()
	m.settle()
	before := m.held(key)
	if len(before) == 0 {
		t.Error("nobody owns the lock")
	}
	return func() {
		t.Helper()
		m.settle()
		for one, was := range before {
			if is, _ := one.Get(key); is != was {
				t.Errorf("the next owner's key changed from %q to %q", was, is)
			}
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
// interferes, and makes of it one that locks as another quorum's client would. Before it does, it
// lets the servers settle.
type everywhere struct {
	others []*redis.Client
	settle func()
}

func (h everywhere) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h everywhere) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.settle()
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
		h.settle()
		for _, other := range h.others {
			for _, cmd := range cmds {
				_ = other.Do(ctx, cmd.Args()...)
			}
		}
		return next(ctx, cmds)
	}
}
