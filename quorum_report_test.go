package leased_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/memconn"
	"github.com/leasedmutex/leased/internal/redistest"
)

// mortal is an embedded server that can die, and come back without its data.
type mortal struct {
	*miniredis.Miniredis
	mu    sync.Mutex // guards what follows
	dead  bool
	dying bool          // it dies when it has answered one more script
	slow  time.Duration // for so long a script is on its way
	mute  bool          // it answers nothing
	proxy bool          // it is a proxy that has no server: it closes each connection
	dials int
	far   time.Duration // for so long an answer is on its way
	conns []net.Conn
}

var errDead = errors.New("nobody listens")

func (m *mortal) dial(context.Context, string, string) (net.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dials++
	if m.dead {
		return nil, errDead
	}
	if m.proxy {
		conn, other := net.Pipe()
		time.AfterFunc(50*time.Millisecond, func() { _ = other.Close() }) // it tries to reach its server
		return memconn.Buffered(conn), nil
	}
	conn, err := m.Dial()
	if err != nil {
		return nil, err
	}
	conn = memconn.Buffered(conn)
	if m.far > 0 {
		conn = &faraway{Conn: conn, delay: m.far}
	}
	m.conns = append(m.conns, conn)
	return conn, nil
}

func (m *mortal) die() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead, m.mute = true, false
	for _, conn := range m.conns {
		_ = conn.Close()
	}
	m.conns = nil
}

// fallSilent has the server answer nothing from now on.
func (m *mortal) fallSilent() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mute = true
}

// losesServer has the server be a proxy that has lost its own.
func (m *mortal) losesServer() {
	m.die()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead, m.proxy = false, true
}

func (m *mortal) dialed() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dials
}

// unanswered waits until the command is given up, if the server is silent, and reports whether it was.
func (m *mortal) unanswered(ctx context.Context) bool {
	m.mu.Lock()
	mute := m.mute
	m.mu.Unlock()
	if mute {
		<-ctx.Done()
	}
	return mute
}

// moveAway has each answer be on its way for so long, on connections that are made from now on.
func (m *mortal) moveAway(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.far = d
}

// slowBy has scripts be on their way for so long.
func (m *mortal) slowBy(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slow = d
}

func (m *mortal) comeBackEmpty() {
	m.FlushAll()
	m.comeBack()
}

func (m *mortal) comeBack() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead = false
}

// breakConnections ends all that the servers have, and they take new ones.
func breakConnections(servers []*mortal) {
	for _, m := range servers {
		m.die()
		m.comeBack()
	}
}

// afterScripts has it die after a script, if it is to.
type afterScripts struct{ m *mortal }

func (h afterScripts) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h afterScripts) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if h.m.unanswered(ctx) {
			for _, cmd := range cmds {
				cmd.SetErr(ctx.Err())
			}
			return ctx.Err()
		}
		return next(ctx, cmds)
	}
}
func (h afterScripts) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.m.unanswered(ctx) {
			return ctx.Err()
		}
		h.m.mu.Lock()
		slow := h.m.slow
		h.m.mu.Unlock()
		if slow > 0 && strings.HasPrefix(cmd.Name(), "eval") {
			time.Sleep(slow) // of virtual time: what makes the server slow
		}
		err := next(ctx, cmd)
		h.m.mu.Lock()
		dies := h.m.dying && err == nil && strings.HasPrefix(cmd.Name(), "eval")
		h.m.mu.Unlock()
		if dies {
			h.m.die()
		}
		return err
	}
}

// onMortals runs f on five of them in virtual time, which are old enough to vote. open
// returns clients of the quorum.
func onMortals(t *testing.T, f func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client)) {
	t.Helper()
	onSomeMortals(t, 5, f)
}

// onSomeMortals is onMortals with n of them.
func onSomeMortals(t *testing.T, n int, f func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		var servers []*mortal
		for range n {
			m := &mortal{Miniredis: redistest.Mini(t)}
			if err := m.Set("leased:quorum:mark", "1"); err != nil {
				t.Fatal(err)
			}
			servers = append(servers, m)
		}
		f(t, servers, func(opts ...leased.Option) *leased.Client { return openMortals(t, servers, opts...) })
	})
}

// openMortals returns a client of a quorum.
func openMortals(t *testing.T, servers []*mortal, opts ...leased.Option) *leased.Client {
	t.Helper()
	return openHooked(t, servers, nil, opts...)
}

// client returns a Redis client of the server.
func (m *mortal) client(t *testing.T) *redis.Client {
	t.Helper()
	return redistest.MiniClient(t, m.Miniredis, func(o *redis.Options) { o.Dialer, o.ContextTimeoutEnabled = m.dial, true })
}

// openHooked is openMortals with a hook, unless it is nil, of the connections to all servers.
func openHooked(t *testing.T, servers []*mortal, hook redis.Hook, opts ...leased.Option) *leased.Client {
	t.Helper()
	var rdbs []redis.UniversalClient
	for _, m := range servers {
		rdb := m.client(t)
		rdb.AddHook(afterScripts{m})
		if hook != nil {
			rdb.AddHook(hook)
		}
		rdbs = append(rdbs, rdb)
	}
	c, err := leased.NewQuorum(rdbs, append([]leased.Option{leased.WithLogger(slog.New(slog.DiscardHandler))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// viewed returns the servers as one client sees them: those that die do for it alone.
func viewed(servers []*mortal) (own []*mortal) {
	for _, m := range servers {
		own = append(own, &mortal{Miniredis: m.Miniredis})
	}
	return own
}

// stands checks what Inspect shows.
func stands(t *testing.T, c *leased.Client, answered, behind int) leased.Info {
	t.Helper()
	info, err := c.Inspect(context.Background(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if info.Servers != 5 || info.Answered != answered || info.Behind != behind {
		t.Errorf("%d of %d servers answered, and %d name the owner; want %d and %d", info.Answered, info.Servers, info.Behind, answered, behind)
	}
	return info
}

func TestAQuorumTellsThatTooFewServersMayVote(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		m, out := newMeter(t), &logs{}
		c := open(leased.WithMeterProvider(m), out.option())
		const young = "is new or has lost its data"
		states := func(answering, quarantine, away int64) {
			t.Helper()
			got := m.collect(t)["leased.servers"]
			for state, want := range map[string]int64{"answering": answering, "quarantine": quarantine, "away": away} {
				if n := sum(t, got, "leased.server.state", state); n != want {
					t.Errorf("%d servers are %s, want %d", n, state, want)
				}
			}
		}
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Second)
		restart := func(m *mortal) {
			m.die()
			time.Sleep(time.Second)
			m.comeBackEmpty()
			time.Sleep(5 * time.Second) // until it answers again
		}
		restart(servers[0])
		for range 2 { // the first one may find no more than that the connection is broken
			unlock(t, lock(t, c.Mutex("x")))
			time.Sleep(time.Second)
		}
		states(2, 1, 0)
		if info, warn := out.count(slog.LevelInfo, young), out.count(slog.LevelWarn, young); info != 1 || warn != 0 {
			t.Errorf("with a majority that may vote: %q", out.messages())
		}
		fails := func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_, err := c.Mutex("x").LockContext(ctx)
			isAll(t, err, leased.ErrNoQuorum)
			return err
		}
		restart(servers[1])
		// The first server may vote again some 20 s before the second one, and two are enough.
		var left time.Duration
		if text := fails().Error(); !strings.Contains(text, "for another ") {
			t.Error(text)
		} else if left, _ = time.ParseDuration(strings.TrimRight(text[strings.Index(text, "for another ")+len("for another "):], ")")); left < 30*time.Second || left > 50*time.Second {
			t.Errorf("%v left in %s", left, text)
		}
		states(1, 2, 0)
		if n := out.count(slog.LevelWarn, young); n != 1 {
			t.Errorf("two of three are in quarantine: %q", out.messages())
		}
		restart(servers[1]) // the next restart has to wait for a minute from here
		fails()
		if n := out.count(slog.LevelWarn, "a server of the quorum has lost its data again"); n != 1 || out.count(slog.LevelWarn, young) != 1 {
			t.Errorf("a server has lost its data for a second time: %q", out.messages())
		}
		servers[2].die()
		unlock(t, lock(t, c.Mutex("x"))) // once the quarantine is over
		time.Sleep(time.Second)
		states(2, 0, 1)
	})
}

func TestAServerThatLosesItsDataAgainIsAReasonToWarn(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var out logs
		c := open(out.option())
		for range 2 {
			servers[0].die()
			time.Sleep(time.Second)
			servers[0].comeBackEmpty()
			time.Sleep(5 * time.Second) // until it answers again
			for range 2 {               // the first one may find no more than that the connection is broken
				unlock(t, lock(t, c.Mutex("x")))
				time.Sleep(time.Second)
			}
		}
		if info, warn := out.count(slog.LevelInfo, "is new or has lost its data"), out.count(slog.LevelWarn, "has lost its data again"); info != 1 || warn != 1 {
			t.Errorf("logged %q", out.messages())
		}
	})
}

func TestNewServersThatVoteTogetherAreNoReasonToWarn(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		for _, m := range servers {
			m.FlushAll()
		}
		var out logs
		unlock(t, lock(t, open(out.option()).Mutex("x")))
		time.Sleep(time.Second)
		if n := out.count(slog.LevelInfo, "is new or has lost its data"); n != 3 || len(out.messages()) != 3 {
			t.Errorf("logged %q", out.messages())
		}
	})
}

// Locks go on without a server that refuses everything, so nothing else tells of it.
func TestAServerOfAQuorumThatRefusesCommandsIsLogged(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		out := &logs{}
		c := open(out.option())
		unlock(t, lock(t, c.Mutex("x")))
		servers[1].SetError("READONLY You can't write against a read only replica.")
		for range 5 {
			unlock(t, lock(t, c.Mutex("x")))
			time.Sleep(time.Second)
		}
		if n := out.count(slog.LevelWarn, "a server of the quorum rejects commands"); n != 1 {
			t.Errorf("%d lines, want one: %q", n, out.messages())
		}
		servers[1].SetError("")
	})
}

// Of what a server says, only the first word can be shown where names are secret. What the library makes of
// it names no lock.
func TestWithoutLockNamesTheCauseOfARefusalIsStillNamed(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var text bytes.Buffer
		c := open(leased.WithoutLockNamesInLogs(), leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		unlock(t, lock(t, c.Mutex("secret")))
		servers[1].SetError("MOVED 1234 secret:6379")
		unlock(t, lock(t, c.Mutex("secret")))
		synctest.Wait()
		if log := text.String(); !strings.Contains(log, "rejects commands") || !strings.Contains(log, "not set up for this server") ||
			!strings.Contains(log, ": MOVED") || strings.Contains(log, "secret") {
			t.Errorf("logged %s", log)
		}
		servers[1].SetError("")
	})
}

func TestAServerOfAQuorumThatRefusesRenewalsIsLogged(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		out := &logs{}
		l := lock(t, open(out.option()).Mutex("x"))
		synctest.Wait() // all servers have answered
		servers[1].SetError("READONLY You can't write against a read only replica.")
		time.Sleep(50 * time.Second) // the renewals of a minute, in which one line is enough
		if n := out.count(slog.LevelWarn, "a server of the quorum rejects commands"); n != 1 {
			t.Errorf("%d lines, want one: %q", n, out.messages())
		}
		servers[1].SetError("")
		unlock(t, l)
	})
}

// A caller for whom nothing has to be reported takes a shortcut to a lock that is kept idle.
func TestServersBehindALeaseAreCountedWhateverIsMeasured(t *testing.T) {
	dropped := sdkmetric.Stream{Aggregation: sdkmetric.AggregationDrop{}}
	for what, views := range map[string][]sdkmetric.View{
		"nothing":    {func(sdkmetric.Instrument) (sdkmetric.Stream, bool) { return dropped, true }},
		"everything": nil,
		"the servers behind a hold": {func(i sdkmetric.Instrument) (sdkmetric.Stream, bool) {
			return dropped, i.Name != "leased.hold.servers"
		}},
	} {
		onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
			m := newMeter(t, sdkmetric.WithView(views...))
			c := open(leased.WithIdleHold(time.Minute), leased.WithMeterProvider(m))
			mu := c.Mutex("x")
			const n = 10
			for range n {
				mu.Lock()
				time.Sleep(time.Second) // in which all servers answer
				mu.Unlock()
			}
			if s := c.Stats(); s.Leases != n || s.Behind[5] != n {
				t.Errorf("if %s is measured, of %d leases Stats has the servers behind %v", what, s.Leases, s.Behind)
			}
			got, measured := m.collect(t)["leased.hold.servers"].Data.(metricdata.Histogram[int64])
			if measured != (what != "nothing") || measured && (len(got.DataPoints) != 1 || got.DataPoints[0].Count != n) {
				t.Errorf("if %s is measured, the histogram is %+v", what, got)
			}
		})
	}
}

func TestAQuorumTellsHowManyServersStandBehindALease(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		r, m, out := newRecorder(t), newMeter(t), &logs{}
		c := open(leased.WithTracerProvider(r), leased.WithMeterProvider(m), out.option())
		other := open()
		answering := func(want, away int64) {
			t.Helper()
			got := m.collect(t)["leased.servers"]
			if n := sum(t, got, "leased.server.state", "answering"); n != want {
				t.Errorf("%d servers answer, want %d", n, want)
			}
			if n := sum(t, got, "leased.server.state", "away"); n != away {
				t.Errorf("%d servers are away, want %d", n, away)
			}
		}
		ended := func(l *leased.Lease, behind int) {
			t.Helper()
			was := c.Stats().Behind[behind]
			unlock(t, l)
			if n := c.Stats().Behind[behind] - was; n != 1 {
				t.Errorf("%d leases more with %d servers behind them, want 1: %v", n, behind, c.Stats().Behind)
			}
			has(t, r.last(t, "leased.hold"), "leased.hold.servers", int64(behind), "leased.servers", int64(5))
		}

		stands(t, other, 5, 0)
		l := lock(t, c.Mutex("x"))
		waited := func(least, most int64) {
			t.Helper()
			synctest.Wait()
			span := r.last(t, "leased.wait")
			has(t, span, "leased.servers", int64(5), "leased.answering", nil)
			set := attribute.NewSet(span.Attributes...)
			if n, _ := set.Value("leased.wait.servers"); n.AsInt64() < least || n.AsInt64() > most {
				t.Errorf("%d servers stood behind the lease when its wait ended", n.AsInt64())
			}
		}
		failed := func(answering int64) {
			t.Helper()
			if _, err := c.Mutex("x").TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
				t.Errorf("a second owner: %v", err)
			}
			has(t, r.last(t, "leased.wait"), "leased.answering", answering, "leased.servers", int64(5), "leased.wait.servers", nil)
		}
		waited(3, 5)
		failed(5)
		time.Sleep(time.Second)
		if info := stands(t, other, 5, 5); info.Owners[0].Token != l.Token() {
			t.Errorf("token %d is shown as %d", l.Token(), info.Owners[0].Token)
		}
		ended(l, 5)
		answering(5, 0)

		l = lock(t, c.Mutex("x"))
		servers[0].die()
		servers[3].die()
		time.Sleep(20 * time.Second) // two renewals
		stands(t, other, 3, 3)
		failed(3)
		ended(l, 3)
		unlock(t, lock(t, c.Mutex("y")))
		waited(3, 3)
		answering(3, 2)
		if n := out.count(slog.LevelWarn, "a server of the quorum does not answer"); n != 2 {
			t.Errorf("%d lines say that a server is away: %q", n, out.messages())
		}

		servers[0].comeBackEmpty()
		servers[3].comeBackEmpty()
		time.Sleep(5 * time.Second)
		answering(5, 0)
		if n := out.count(slog.LevelInfo, "a server of the quorum answers again after "); n != 2 {
			t.Errorf("%d lines say that a server is back: %q", n, out.messages())
		}
		for range 2 {
			l = lock(t, c.Mutex("x"))
			time.Sleep(time.Second)
			stands(t, other, 5, 5)
			unlock(t, l)
		}
		synctest.Wait()
		if n := out.count(slog.LevelInfo, "is new or has lost its data"); n != 2 {
			t.Errorf("%d lines say that a server is in quarantine: %q", n, out.messages())
		}

		got := m.collect(t)["leased.hold.servers"]
		data, ok := got.Data.(metricdata.Histogram[int64])
		if !ok || len(data.DataPoints) != 1 || data.DataPoints[0].Sum != 5+3+3+5+5 || data.DataPoints[0].Count != 5 {
			t.Errorf("the histogram is %+v", got.Data)
		}
	})
}

// A server that comes and goes has few lines, and the last one says how things are.
func TestTheLastLineAboutAServerSaysWhetherItAnswers(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		var out logs
		c := open(out.option())
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Minute)
		lines := func() (all []string) {
			synctest.Wait()
			for _, line := range out.messages() {
				if strings.Contains(line, "a server of the quorum") {
					all = append(all, line)
				}
			}
			return all
		}
		for i := range 20 {
			servers[0].die()
			unlock(t, lock(t, c.Mutex("x")))
			time.Sleep(time.Second)
			if i < 19 {
				servers[0].comeBack()
				time.Sleep(time.Second)
			}
		}
		if all := lines(); len(all) > 3 {
			t.Errorf("in 40 s: %q", all)
		}
		time.Sleep(2 * time.Minute)
		all := lines()
		if last := all[len(all)-1]; !strings.Contains(last, "does not answer") || len(all) > 4 {
			t.Errorf("while it is away: %q", all)
		}
		time.Sleep(time.Hour)
		if n := len(lines()); n != len(all) {
			t.Errorf("an hour later: %q", lines())
		}
		servers[0].comeBack()
		time.Sleep(5 * time.Second)
		all = lines()
		if last := all[len(all)-1]; !strings.Contains(last, "answers again") {
			t.Errorf("when it is back: %q", all)
		}
	})
}

// On some servers the lease is the reader's, and on others it still is the writer's.
func TestServersStandBehindALeaseWhoseDowngradeIsNotDecided(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		c := open()
		l := take(t, c.RWMutex("x").LockContext)
		time.Sleep(time.Second)
		for _, m := range servers[:3] {
			m.die()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		isAll(t, l.Downgrade(ctx), leased.ErrNoQuorum)
		if err := l.Context().Err(); err != nil {
			t.Fatalf("the lease has ended: %v", context.Cause(l.Context()))
		}
		_ = l.Unlock()
		if n := c.Stats().Behind; n[2] != 1 || n[0] != 0 {
			t.Errorf("behind the lease there stood: %v", n)
		}
		for _, m := range servers[:3] {
			m.comeBack()
		}
		time.Sleep(5 * time.Minute)
	})
}

// Of the owners that several minorities name, none has the lock.
func TestOnlyAMajorityOfAQuorumSaysThatAnotherCallerHadTheLock(t *testing.T) {
	id := func(client, number string) string { return "leased1:w:30000:u:" + number + ":" + client + ":host:1" }
	a, again := id("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"), id("aaaaaaaaaaaaaaaa", "cccccccccccccccc") // one client's
	b := id("dddddddddddddddd", "eeeeeeeeeeeeeeee")
	for _, x := range []struct {
		owners [5]string
		then   func(first *mortal) // after half a second
		taken  bool
	}{
		{[...]string{"foreign", "foreign", "foreign", "", ""}, nil, true},
		{[...]string{a, again, again, "", ""}, nil, true},
		{[...]string{a, a, b, b, b}, nil, true},
		{[...]string{a, a, b, b, ""}, nil, false},
		{[...]string{a, a, a, b, ""}, func(first *mortal) { first.Del("x") }, false},
		{[...]string{a, a, a, "", ""}, (*mortal).die, false},
	} {
		onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
			c := open()
			unlock(t, lock(t, c.Mutex("x")))
			for i, owner := range x.owners {
				if owner != "" {
					must(t, servers[i].Set("x", owner))
				}
			}
			if x.then != nil {
				time.AfterFunc(500*time.Millisecond, func() { x.then(servers[0]) })
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_, err := c.Mutex("x").LockContext(ctx)
			isAll(t, err, leased.ErrNotAcquired, context.DeadlineExceeded)
			if got := errors.Is(err, leased.ErrLocked); got != x.taken {
				t.Errorf("%q: taken: %v, %v", x.owners, got, err)
			}
			time.Sleep(time.Minute)
			for _, m := range servers {
				m.Del("x")
			}
			servers[0].comeBack()
			time.Sleep(time.Minute)
		})
	}
}

// The first of them waits still when the second one comes.
func TestTwoUnlocksOfOneLeaseMeasureTheServersThatStoodBehindIt(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		r := newRecorder(t)
		c := open(leased.WithTracerProvider(r), leased.WithUncontendedSpans())
		mu := c.Mutex("x")
		l := lock(t, mu)
		time.Sleep(time.Second) // of virtual time: the last servers have answered
		for _, m := range servers {
			m.die()
		}
		var first sync.WaitGroup
		first.Go(mu.Unlock)
		synctest.Wait()
		isAll(t, l.Unlock(), leased.ErrNotReleased)
		first.Wait()
		synctest.Wait()
		has(t, r.last(t, "leased.hold"), "leased.hold.servers", int64(5))
		if n := c.Stats().Behind; n[5] != 1 || n[0] != 0 {
			t.Errorf("leases by the number of servers behind them: %v", n)
		}
		for _, m := range servers {
			m.comeBack()
		}
		time.Sleep(time.Minute) // of virtual time: the cancels are sent
	})
}

// eager collects as soon as it can.
type eager struct{ noop.MeterProvider }

func (eager) Meter(string, ...metric.MeterOption) metric.Meter {
	return &eagerMeter{} // another one each time, so that no two clients share the callback
}

type eagerMeter struct{ noop.Meter }

func (eagerMeter) RegisterCallback(f metric.Callback, _ ...metric.Observable) (metric.Registration, error) {
	return noop.Registration{}, f(context.Background(), noop.Observer{})
}

func TestMetricsMayBeCollectedBeforeTheClientIsReturned(t *testing.T) {
	onMortals(t, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		unlock(t, lock(t, open(leased.WithMeterProvider(eager{})).Mutex("x")))
		c, err := leased.New(redistest.MiniClient(t, servers[0].Miniredis), leased.WithMeterProvider(eager{}))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

// The others go on, and when too few of these are left, it is an outage like any other.
func TestOneOfAQuorumsRedisClientsIsClosed(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, _ func(...leased.Option) *leased.Client) {
		var rdbs []redis.UniversalClient
		for _, m := range servers {
			rdbs = append(rdbs, m.client(t))
		}
		var out logs
		c, err := leased.NewQuorum(rdbs, out.option())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		confirmInboxes(t, c)
		must(t, rdbs[0].Close())
		unlock(t, lock(t, c.Mutex("x")))
		synctest.Wait()
		if out.count(slog.LevelWarn, "rejects commands") == 0 {
			t.Errorf("logged %q", out.messages())
		}
		servers[1].die()
		if c.Mutex("x").TryLock() {
			t.Error("one of three servers grants a lock")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err = c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNoQuorum, context.DeadlineExceeded)
		if errors.Is(err, leased.ErrClosed) {
			t.Errorf("%v matches ErrClosed", err)
		}
		_, inspected := c.Inspect(t.Context(), "x")
		forced := forceUnlock(t.Context(), c, "x")
		for _, err := range []error{inspected, forced} {
			if isAll(t, err, leased.ErrNoQuorum); errors.Is(err, leased.ErrClosed) {
				t.Errorf("an operator's: %v matches ErrClosed", err)
			}
		}
		synctest.Wait()
		if out.count(slog.LevelWarn, "does not answer") == 0 {
			t.Errorf("logged %q", out.messages())
		}
		servers[1].comeBack()
		unlock(t, lock(t, c.Mutex("x")))
	})
}

// A server that has restarted without its data grants the lease anew when it is renewed, with a later token.
func TestInspectShowsTheLeasesFirstTokenThoughServersHaveGrantedItAnew(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		l := lock(t, open().Mutex("x"))
		began := time.Now()
		shows := func(answered int) {
			t.Helper()
			info, err := open().Inspect(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			if info.Answered != answered || info.Behind != answered {
				t.Fatalf("%d servers answered, and %d name the owner; want %d", info.Answered, info.Behind, answered)
			}
			if o := info.Owners[0]; o.Token != l.Token() || o.Since.Sub(began).Abs() > time.Second {
				t.Errorf("token %d is shown as %d, since %v after the grant", l.Token(), o.Token, o.Since.Sub(began))
			}
		}
		time.Sleep(62 * time.Second)
		shows(3)
		servers[1].die()
		servers[2].die()
		time.Sleep(time.Second)
		servers[1].comeBackEmpty()
		time.Sleep(30 * time.Second) // until it has answered a renewal
		shows(2)
		servers[2].comeBackEmpty()
		time.Sleep(30 * time.Second)
		shows(3)
		unlock(t, l)
	})
}

// Nothing in Redis tells the first token then.
func TestInspectShowsALaterTokenOnceNoServerHasALeasesFirstGrant(t *testing.T) {
	onSomeMortals(t, 3, func(t *testing.T, servers []*mortal, open func(...leased.Option) *leased.Client) {
		l := lock(t, open().Mutex("x"))
		for _, m := range servers {
			time.Sleep(time.Second)
			m.die()
			time.Sleep(time.Second)
			m.comeBackEmpty()
			time.Sleep(80 * time.Second) // until the quarantine is over
		}
		info, err := open().Inspect(t.Context(), "x")
		if err != nil || info.Behind != 3 || info.Owners[0].Token <= l.Token() {
			t.Errorf("lease %d, %+v, %v", l.Token(), info, err)
		}
		unlock(t, l)
	})
}
