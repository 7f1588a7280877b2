package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestMain(m *testing.M) {
	logging.Disable() // go-redis logs that it cannot dial what a test has broken
	os.Exit(redistest.Main(m))
}

// patience bounds what must happen at no particular time.
const patience = 30 * time.Second

// place is where a test's locks live: a server, the test's own key prefix, and a
// connection for looking and for interfering.
type place struct {
	redistest.Target       // in virtual time only Prefix is set
	Mini             minis // the embedded servers, none on a real one
	rdb              redis.UniversalClient
	members          *members // of a quorum, else nil
}

// servers returns how many servers keep a lock. Each of a quorum has log lines of its own.
func (s place) servers() int {
	if s.members != nil {
		return suiteMembers
	}
	return 1
}

// minis are one embedded server, or those of a quorum. What a test does to the server is
// done to all, once these have done what they were asked.
type minis struct {
	all    []*miniredis.Miniredis
	settle func() // nil for one server
}

func (m minis) each(f func(one *miniredis.Miniredis)) {
	if m.settle != nil {
		m.settle()
	}
	for _, one := range m.all {
		f(one)
	}
}

func (m minis) SetError(text string) {
	m.each(func(one *miniredis.Miniredis) { one.SetError(text) })
}

func (m minis) FlushAll() { m.each((*miniredis.Miniredis).FlushAll) }

func (m minis) SetTime(at time.Time) {
	m.each(func(one *miniredis.Miniredis) { one.SetTime(at) })
}

func (m minis) SetPreHook(f func(p *mini.Peer, cmd string, args ...string) bool) {
	m.each(func(one *miniredis.Miniredis) { one.Server().SetPreHook(f) })
}

func placeAt(target redistest.Target, rdb redis.UniversalClient) place {
	s := place{Target: target, rdb: rdb}
	if target.Mini != nil {
		s.Mini = minis{all: []*miniredis.Miniredis{target.Mini}}
	}
	return s
}

// onBoth runs f on the embedded and on a real server side by side, in real time, and
// where else LEASED_SERVERS says, and fails it for what it leaves behind. It is the last
// call of its test: see redistest.OnBoth.
func onBoth(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	redistest.OnBoth(t, placed(f))
	onDeployments(t, f)
}

// inTurn is onBoth with one server after the other, for tests that count what the whole
// process has.
func inTurn(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	redistest.InTurn(t, placed(f))
	onDeployments(t, f)
}

func placed(f func(t *testing.T, s place)) func(t *testing.T, target redistest.Target) {
	return func(t *testing.T, target redistest.Target) {
		s := placeAt(target, target.NewClient(t))
		redistest.CheckLeaks(t, s.rdb, s.Prefix)
		f(t, s)
	}
}

// inVirtualTime runs f on the embedded server, where time passes only while all
// goroutines wait, and to the nanosecond.
func inVirtualTime(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	if wantsQuorum() { // instead: a bubble of its own beside this one is too much for go-redis
		synctest.Test(t, func(t *testing.T) {
			redistest.LastInBubble(t)
			f(t, quorumPlace(t, true))
		})
		return
	}
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		m := redistest.Mini(t)
		s := placeAt(redistest.Target{Name: "virtual", Mini: m}, redistest.MiniClient(t, m))
		redistest.CheckLeaks(t, s.rdb, "")
		f(t, s)
	})
}

// connect returns connections that end with the test. Where there is more than one
// server to connect to, the test is skipped: see universal.
func (s place) connect(t *testing.T, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	if s.members != nil {
		return s.members.connect(t, change)
	}
	if s.Addr == "" {
		return redistest.MiniClient(t, s.Mini.all[0], change...)
	}
	if s.Deployment != nil {
		rdb, one := s.Deployment.Connect(t, change...).(*redis.Client)
		if !one {
			t.Skip("about a client of one server")
		}
		return rdb
	}
	return s.NewClient(t, change...)
}

// newClient returns a client with separate connections, as another process would
// have.
func newClient(t *testing.T, s place, opts ...leased.Option) *leased.Client {
	t.Helper()
	return clientOn(t, s, s.universal(t), opts...)
}

// clientOn returns a client on rdb that is closed at the end of the test, when
// all its leases must have been unlocked. It discards its log unless opts say otherwise.
// In real time a release may take as long as it needs: on a busy machine a second passes
// easily.
func clientOn(t *testing.T, s place, rdb redis.UniversalClient, opts ...leased.Option) *leased.Client {
	t.Helper()
	opts = append([]leased.Option{
		leased.WithKeyPrefix(s.Prefix),
		leased.WithLogger(slog.New(slog.DiscardHandler)),
	}, opts...)
	if s.Addr != "" {
		opts = append([]leased.Option{leased.WithReleaseTimeout(patience)}, opts...)
	}
	c, err := s.open(t, rdb, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := leased.Closed(c) // by the test, which knows what it returned
		if err := c.Close(); err != nil && !closed {
			t.Errorf("Close at the end of the test: %v", err)
		}
	})
	return c
}

// open returns a client on rdb that the test closes.
func (s place) open(t *testing.T, rdb redis.UniversalClient, opts ...leased.Option) (*leased.Client, error) {
	t.Helper()
	if s.members != nil {
		return s.members.open(t, rdb, opts)
	}
	return leased.New(rdb, opts...)
}

// alike are the connections that rdb stands for: rdb, or on a quorum one like it to each server,
// for a test that does something to them.
func (s place) alike(rdb *redis.Client) []*redis.Client {
	s.settle()
	if s.members != nil {
		return s.members.alike(rdb)
	}
	return []*redis.Client{rdb}
}

// hook adds a hook to them.
func (s place) hook(rdb *redis.Client, h redis.Hook) {
	for _, one := range s.alike(rdb) {
		one.AddHook(h)
	}
}

// commands returns how many commands the client has sent to a server.
func (s place) commands(c *leased.Client) int64 {
	s.settle()
	return s.share(c.Stats().Commands)
}

// most is how many servers decide.
func (s place) most() int {
	if s.members != nil {
		return suiteMembers/2 + 1
	}
	return 1
}

// share returns how much of n one server has.
func (s place) share(n int64) int64 {
	if s.members != nil {
		return (n + suiteMembers - 1) / suiteMembers
	}
	return n
}

// saying is the text of an error that the servers answer.
func (s place) saying(text string) string {
	if s.members != nil {
		return fmt.Sprintf("0 of %d servers answered, but %d are needed; %s", suiteMembers, s.most(), text)
	}
	return text
}

// wires are a proxy in front of each server. A client whose address is Addr goes through them.
type wires struct {
	*redistest.Proxy // of the first
	others           []*redistest.Proxy
	settle           func()
}

func (s place) proxy(t *testing.T) *wires {
	w := &wires{Proxy: redistest.NewProxy(t, s.Addr), settle: s.settle}
	if s.members != nil {
		s.members.addProxies(t, w)
	}
	return w
}

func (w *wires) each(f func(p *redistest.Proxy)) {
	w.settle()
	f(w.Proxy)
	for _, p := range w.others {
		f(p)
	}
}

func (w *wires) BlackHole()   { w.each((*redistest.Proxy).BlackHole) }
func (w *wires) DropReplies() { w.each((*redistest.Proxy).DropReplies) }
func (w *wires) Heal()        { w.each((*redistest.Proxy).Heal) }
func (w *wires) Cut()         { w.each((*redistest.Proxy).Cut) }
func (w *wires) Refuse()      { w.each((*redistest.Proxy).Refuse) }
func (w *wires) Accept()      { w.each((*redistest.Proxy).Accept) }

// helperKeys are the keys beside the lock's own, as docs/design.md names them.
func (s place) helperKeys(name string) (queue, readers, waiters, meta string) {
	key := s.Prefix + name
	stem := key + ":{" + key + "}:"
	return stem + "queue", stem + "readers", stem + "waiters", stem + "meta"
}

// value returns what stands in the lock's key, "" if nothing does. On a quorum it is what stands
// there on the first server, or on another if most have something: a lock is taken without a server
// that does not answer yet.
func (s place) value(t *testing.T, name string) string {
	t.Helper()
	v, err := s.rdb.Get(context.Background(), s.Prefix+name).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	if v == "" && s.members != nil {
		return s.members.value(s.Prefix + name)
	}
	return v
}

// settle lets the servers of a quorum do what callers do not wait for: a majority is enough
// for them. What a test does to the servers by its place does this first.
func (s place) settle() {
	if s.members != nil {
		s.members.settle()
	}
}

// forget has the servers lose all that they have of locks. On a quorum they go on voting, as when
// the keys are deleted: if all restarted without their data, Unlock would say otherwise, according
// to how many answer (docs/redlock.md).
func (s place) forget(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	must(t, s.rdb.FlushAll(ctx).Err())
	if s.members != nil {
		must(t, s.rdb.MSet(ctx, s.Prefix+"leased:quorum:mark", "1").Err())
	}
}

// unchanged notes what stands in the lock's key. The function it returns fails t if
// something else stands there: a late command touched the key of the next owner.
func (s place) unchanged(t *testing.T, name string) func() {
	t.Helper()
	if s.members != nil {
		return s.members.unchanged(t, s.Prefix+name)
	}
	before := s.value(t, name)
	return func() {
		t.Helper()
		if after := s.value(t, name); after != before {
			t.Errorf("the next owner's key changed from %q to %q", before, after)
		}
	}
}

// inboxes are the channels of all clients that listen.
func (s place) inboxes(t *testing.T) []string {
	t.Helper()
	all, err := redistest.Channels(context.Background(), s.rdb, s.Prefix+"leased:inbox:")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// lockKeys are all keys that locks have made.
func (s place) lockKeys(t *testing.T) []string {
	t.Helper()
	all, err := redistest.Keys(context.Background(), s.rdb, s.Prefix)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(key string) bool { return s.members != nil && strings.HasSuffix(key, "leased:quorum:mark") })
}

// lead is by how many µs a token may be ahead of the server's clock: on a quorum, where that
// is much less than a TTL, which is 30 s unless a test says otherwise.
func (s place) lead() uint64 {
	if s.members != nil {
		return uint64((30*time.Second/200 + time.Millisecond).Microseconds())
	}
	return 0
}

// clean reports whether the lock has neither an owner nor a waiter.
func (s place) clean(t *testing.T, name string) bool {
	t.Helper()
	queue, readers, waiters, _ := s.helperKeys(name)
	n, err := s.rdb.Exists(context.Background(), s.Prefix+name, queue, readers, waiters).Result()
	if err != nil {
		t.Fatal(err)
	}
	return n == 0
}

// becomesClean waits until the lock is clean. What is left in Redis ends with its TTL, which by default is as
// long as eventually waits; that does not count.
func (s place) becomesClean(t *testing.T, name string) {
	t.Helper()
	began := time.Now()
	eventually(t, "nobody owns or waits", func() bool { return s.clean(t, name) })
	if took := time.Since(began); took > patience/3 {
		t.Errorf("nobody owns or waits only after %v, as if by a TTL", took)
	}
}

// queued returns when n processes wait for the lock. On a quorum they have been told so by then: what
// is granted to one that has not is an answer to it, for which it has not waited.
func (s place) queued(t *testing.T, name string, n int64) {
	t.Helper()
	queue, _, _, _ := s.helperKeys(name)
	eventually(t, "the queue has its length", func() bool {
		if s.members != nil {
			return s.members.queued(queue, n)
		}
		return s.rdb.ZCard(context.Background(), queue).Val() == n
	})
	s.settle()
}

var eventually = redistest.Eventually

// closesSoon waits for an event.
func closesSoon[T any](t *testing.T, what string, ch <-chan T) T {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case v := <-ch:
		return v
	case <-timer.C:
		t.Fatalf("not within %v: %s", patience, what)
		panic("unreachable")
	}
}

// open reports whether nothing has come through ch and it is not closed.
func open[T any](ch <-chan T) bool {
	select {
	case <-ch:
		return false
	default:
		return true
	}
}

func lock(t *testing.T, mu *leased.Mutex) *leased.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	l, err := mu.LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func unlock(t *testing.T, l *leased.Lease) {
	t.Helper()
	if err := l.Unlock(); err != nil {
		t.Fatalf("Unlock: %v", err)
	}
}

// locking locks in a goroutine, which sends the lease.
func locking(t *testing.T, mu *leased.Mutex) <-chan *leased.Lease {
	ch := make(chan *leased.Lease, 1)
	go func() {
		l, err := mu.LockContext(context.Background())
		if err != nil {
			t.Error(err)
		}
		ch <- l
	}()
	return ch
}

// isAll fails t unless err matches every one of wants.
func isAll(t *testing.T, err error, wants ...error) {
	t.Helper()
	for _, want := range wants {
		if !errors.Is(err, want) {
			t.Errorf("%v does not match %v", err, want)
		}
	}
}

// panics returns what f panics with, nil if it does not.
func panics(f func()) (with any) {
	defer func() { with = recover() }()
	f()
	return nil
}

// room notices when two callers are inside. The plain counter is for the race detector
// and shows lost updates.
type room struct {
	inside  atomic.Int32
	crowded atomic.Bool
	visits  int
}

func (r *room) visit(f func()) {
	if r.inside.Add(1) != 1 {
		r.crowded.Store(true)
	}
	r.visits++
	f()
	r.inside.Add(-1)
}

// logs keeps what a client logs above Debug.
type logs struct {
	mu    sync.Mutex // guards lines
	lines []slog.Record
}

func (l *logs) option() leased.Option                            { return leased.WithLogger(slog.New(l)) }
func (l *logs) Enabled(_ context.Context, level slog.Level) bool { return level > slog.LevelDebug }
func (l *logs) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *logs) WithGroup(string) slog.Handler                    { return l }

func (l *logs) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, r)
	return nil
}

// count returns how many lines of that level contain text.
func (l *logs) count(level slog.Level, text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, r := range l.lines {
		if r.Level == level && strings.Contains(r.Message, text) {
			n++
		}
	}
	return n
}

// messages returns all lines.
func (l *logs) messages() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for _, r := range l.lines {
		all = append(all, r.Level.String()+" "+r.Message)
	}
	return all
}
