package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

func TestABadNameIsRefusedWithoutACommand(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		for _, name := range []string{
			"", strings.Repeat("n", 513), "a}b", "}", "{}", "a{}b", "{a", "a{", "}a{b}", "\xff", "a\xc3", "{}{a}",
			"leased:quorum:mark", "x:leased:quorum:mark", "new\nline", "\x00", "a\x1b[2J", "a\u0085b", "\x7f",
		} {
			refusesAll(t, c.Mutex(name), leased.ErrInvalidName)
		}
		if n := s.commands(c); n != 0 {
			t.Errorf("sent %d commands", n)
		}
	})
}

// refusesAll checks that every way to lock fails with want, as an error where
// there is one to return and as a panic where not.
func refusesAll(t *testing.T, mu *leased.Mutex, want error) {
	t.Helper()
	_, err := mu.LockContext(context.Background())
	if isAll(t, err, leased.ErrNotAcquired, want); t.Failed() {
		return
	}
	_, err = mu.TryLockContext(context.Background())
	isAll(t, err, leased.ErrNotAcquired, want)
	err = mu.Do(context.Background(), func(context.Context) error { t.Error("it ran"); return nil })
	isAll(t, err, leased.ErrNotAcquired, want)
	oneLine(t, err)
	for what, f := range map[string]func(){"Lock": mu.Lock, "TryLock": func() { mu.TryLock() }, "Unlock": mu.Unlock} {
		if got, ok := panics(f).(error); !ok || !errors.Is(got, want) {
			t.Errorf("%s panicked with %v, not with %v", what, got, want)
		}
	}
}

// oneLine checks that an error reads as one line that says its package once.
func oneLine(t *testing.T, err error) {
	t.Helper()
	if text := err.Error(); strings.Contains(text, "\n") || !strings.HasPrefix(text, "leased: ") || strings.Count(text, "leased: ") != 1 {
		t.Errorf("the error reads %q", text)
	}
}

func TestAMisuseIsExplainedInOneLine(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		background := context.Background()
		nothing := func(context.Context) error { t.Error("it ran"); return nil }
		var noContext context.Context
		for want, err := range map[string]error{
			`leased: lock "a}b" not acquired: invalid lock name: "` + s.Prefix + `a}b" has a } without a { before it`:                                                                                   c.Mutex("a}b").Do(background, nothing),
			`leased: lock "leased:quorum:mark" not acquired: invalid lock name: "` + s.Prefix + `leased:quorum:mark" ends with "leased:quorum:mark", which is where a server of a quorum keeps its age`: c.Mutex("leased:quorum:mark").Do(background, nothing),
			`leased: lock "x" not acquired: invalid option: TTL 0s must be whole milliseconds between 100ms and 720h0m0s`:                                                                               c.RWMutex("x", leased.WithTTL(0)).RDo(background, nothing),
			`leased: lock "x" not acquired: the context is nil`:              c.Mutex("x").Do(noContext, nothing),
			`leased: lock "x" not acquired: the function is nil`:             c.Mutex("x").Do(background, nil),
			"leased: Mutex was not made by Client.Mutex":                     new(leased.Mutex).Do(background, nothing),
			"leased: RWMutex was not made by Client.RWMutex":                 new(leased.RWMutex).RDo(background, nothing),
			"leased: the Client is nil, or was not made by New or NewQuorum": new(leased.Client).Mutex("x").Do(background, nothing),
			"leased: Lease is nil, or was not returned by LockContext":       (*leased.Lease)(nil).Unlock(),
			"leased: the context is nil":                                     c.Shutdown(noContext),
		} {
			if err == nil || err.Error() != want {
				t.Errorf("got %v, want %s", err, want)
			}
		}
		if got, ok := panics(c.Mutex("x", leased.WithTTL(0)).Unlock).(error); !ok || !strings.HasPrefix(got.Error(), `leased: lock "x" not unlocked: invalid option: TTL 0s`) {
			t.Errorf("Unlock panicked with %v", got)
		}
		if n := s.commands(c); n != 0 {
			t.Errorf("sent %d commands", n)
		}
	})
}

func TestWhatWasNotMadeByTheLibraryExplainsItself(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		l := lock(t, c.Mutex("x"))
		defer unlock(t, l)
		background := context.Background()
		var noContext context.Context
		panicking := map[string][]func(){
			"leased: Mutex was not made by Client.Mutex":               nil,
			"leased: RWMutex was not made by Client.RWMutex":           nil,
			"leased: Lease is nil, or was not returned by LockContext": nil,
			"leased: the context is nil":                               {func() { l.With(noContext) }},
		}
		failing := map[string][]func() error{
			`leased: lock "x" not unlocked: the context is nil`:       {func() error { return l.UnlockContext(noContext) }},
			`leased: lock "x" not downgraded: the context is nil`:     {func() error { return l.Downgrade(noContext) }},
			`leased: lock "x" not checked: the context is nil`:        {func() error { return l.Check(noContext) }},
			`leased: inspecting lock "x": the context is nil`:         {func() error { _, err := c.Inspect(noContext, "x"); return err }},
			`leased: unlocking lock "x" by force: the context is nil`: {func() error { return forceUnlock(noContext, c, "x") }},
			"leased: the context is nil":                              {func() error { return c.Shutdown(noContext) }},
		}
		for _, mu := range []*leased.Mutex{nil, {}} {
			text := "leased: Mutex was not made by Client.Mutex"
			panicking[text] = append(panicking[text], mu.Lock, mu.Unlock, func() { mu.TryLock() })
			failing[text] = append(failing[text],
				func() error { _, err := mu.LockContext(background); return err },
				func() error { _, err := mu.TryLockContext(background); return err },
				func() error { return mu.Do(background, func(context.Context) error { return nil }) },
				func() error { return mu.UnlockContext(background) })
		}
		for _, rw := range []*leased.RWMutex{nil, {}} {
			text := "leased: RWMutex was not made by Client.RWMutex"
			panicking[text] = append(panicking[text], rw.Lock, rw.Unlock, rw.RLock, rw.RUnlock, rw.RLocker().Lock,
				func() { rw.TryLock() }, func() { rw.TryRLock() })
			failing[text] = append(failing[text],
				func() error { _, err := rw.LockContext(background); return err },
				func() error { _, err := rw.TryLockContext(background); return err },
				func() error { _, err := rw.RLockContext(background); return err },
				func() error { _, err := rw.TryRLockContext(background); return err },
				func() error { return rw.Do(background, func(context.Context) error { return nil }) },
				func() error { return rw.RDo(background, func(context.Context) error { return nil }) },
				func() error { return rw.UnlockContext(background) },
				func() error { return rw.RUnlockContext(background) })
		}
		for _, l := range []*leased.Lease{nil, {}} {
			text := "leased: Lease is nil, or was not returned by LockContext"
			panicking[text] = append(panicking[text], func() { l.Token() }, func() { l.TrustedUntil() }, func() { l.Context() },
				func() { l.With(background) })
			failing[text] = append(failing[text], l.Unlock,
				func() error { return l.Downgrade(background) }, func() error { return l.Check(background) })
		}
		for _, c := range []*leased.Client{nil, {}} {
			text := "leased: the Client is nil, or was not made by New or NewQuorum"
			panicking[text] = append(panicking[text], c.Mutex("x").Lock, c.Mutex("x").Unlock, c.RWMutex("x").RUnlock,
				func() { c.Mutex("x").TryLock() })
			failing[text] = append(failing[text], c.Close,
				func() error { return c.Shutdown(background) },
				func() error { _, err := c.Inspect(background, "x"); return err },
				func() error { return forceUnlock(background, c, "x") },
				func() error { _, err := c.Mutex("x").LockContext(background); return err })
			if c.Stats() != (leased.Stats{}) {
				t.Error("a client that was not made counts")
			}
		}
		for want, all := range panicking {
			for i, f := range all {
				if err, ok := panics(f).(error); !ok || err.Error() != want {
					t.Errorf("%d of %q panicked with %v", i, want, err)
				}
			}
		}
		for want, all := range failing {
			for i, f := range all {
				if err := f(); err == nil || err.Error() != want {
					t.Errorf("%d of %q: %v", i, want, err)
				}
			}
		}
	})
}

func TestAnyOtherNameIsALock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		for _, name := range []string{
			"n", strings.Repeat("n", 512), "with space", "{tag}", "a{tag}b", "{a}}", "{a}{b}", "{a}{}", "{{a}",
			"ключ", "🔒", "*?[a]", `"`, "%s%n",
		} {
			l := lock(t, c.Mutex(name))
			if _, err := other.Mutex(name).TryLockContext(context.Background()); !errors.Is(err, leased.ErrLocked) {
				t.Errorf("%q: %v", name, err)
			}
			waiter := locking(t, other.Mutex(name))
			eventually(t, "it waits", func() bool { return inspect(t, c, name).Queue == 1 })
			unlock(t, l)
			unlock(t, closesSoon(t, "it gets in", waiter))
		}
	})
}

func TestABadOptionIsRefused(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		for what, o := range map[string]leased.LockOption{
			"nil option":          nil,
			"TTL zero":            leased.WithTTL(0),
			"TTL negative":        leased.WithTTL(-time.Second),
			"TTL below 100 ms":    leased.WithTTL(99 * time.Millisecond),
			"TTL in microseconds": leased.WithTTL(time.Second + time.Microsecond),
			"TTL too long":        leased.WithTTL(30*24*time.Hour + time.Millisecond),
			"TTL huge":            leased.WithTTL(1<<63 - 1),
			"minimum hold":        leased.WithMinHold(30*24*time.Hour + time.Millisecond),
			"maximum hold":        leased.WithMaxHold(-1),
			"idle hold":           leased.WithIdleHold(-1),
			"idle hold too long":  leased.WithIdleHold(30*24*time.Hour + 1),
			"idle hold huge":      leased.WithIdleHold(1<<63 - 1),
			"no hand-off":         leased.WithLocalHandoffs(0, time.Second),
			"negative tenure":     leased.WithLocalHandoffs(1, -1),
			"release timeout":     leased.WithReleaseTimeout(0),
			"release timeout < 0": leased.WithReleaseTimeout(-1),
		} {
			refusesAll(t, c.Mutex("x", o), leased.ErrInvalidOption)
			if _, err := leased.New(s.rdb, o); !errors.Is(err, leased.ErrInvalidOption) {
				t.Errorf("New with %s: %v", what, err)
			}
		}
		for what, o := range map[string]leased.Option{
			"long prefix":      leased.WithKeyPrefix(strings.Repeat("p", 257)),
			"prefix not UTF-8": leased.WithKeyPrefix("\xff"),
			"empty owner":      leased.WithOwner(""),
			"owner with space": leased.WithOwner("a b"),
			"owner with line":  leased.WithOwner("a\nb"),
			"long owner":       leased.WithOwner(strings.Repeat("o", 129)),
			"logger":           leased.WithLogger(nil),
			"loss handler":     leased.WithLossHandler(nil),
			"back-off":         leased.WithBackOff(nil),
			"no policy":        leased.WithBackOff(func() leased.BackOff { return nil }),
			"nil policy":       leased.WithBackOff(func() leased.BackOff { return (*once)(nil) }),
			"empty hash tag":   leased.WithKeyPrefix("app{}:"),
			"brace shut first": leased.WithKeyPrefix("app}:"),
			"slow threshold":   leased.WithSlowThreshold(10*time.Millisecond - 1),
			"no label":         leased.WithLockLabelInMetrics(nil),
			"no key":           leased.WithAttributes(attribute.String("", "x")),
			"no attribute":     leased.WithAttributes(attribute.KeyValue{}),
			"our attribute":    leased.WithAttributes(attribute.String("a", "x"), attribute.String("leased.lock", "x")),
			"error type":       leased.WithAttributes(attribute.String("error.type", "x")),
		} {
			if got, err := leased.New(s.rdb, o); got != nil || !errors.Is(err, leased.ErrInvalidOption) {
				t.Errorf("New with %s: %v", what, err)
			}
		}
		if n := s.commands(c); n != 0 {
			t.Errorf("sent %d commands", n)
		}
	})
}

func TestTheErrorOfAKeyPrefixSaysWhatIsWrong(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true}) // is sent nothing
	defer rdb.Close()
	for prefix, says := range map[string]string{
		"\xff":                   `"\xff" must be UTF-8`,
		strings.Repeat("p", 257): "at most 256 bytes, got 257",
	} {
		if _, err := leased.New(rdb, leased.WithKeyPrefix(prefix)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", prefix, err)
		}
	}
}

func TestAnOptionAtItsBoundIsTaken(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		owner := strings.Repeat("o", 128)
		c := newClient(t, s, leased.WithOwner(owner), leased.WithSlowThreshold(10*time.Millisecond))
		l := lock(t, c.Mutex("x"))
		if info := inspect(t, c, "x"); len(info.Owners) != 1 || info.Owners[0].Client != owner {
			t.Errorf("owned by %+v", info.Owners)
		}
		unlock(t, l)
		const longest = 30 * 24 * time.Hour
		for what, mu := range map[string]*leased.Mutex{
			"the shortest TTL":      c.Mutex("short", leased.WithTTL(100*time.Millisecond)),
			"the longest TTL":       c.Mutex("long", leased.WithTTL(longest)),
			"the longest idle hold": c.Mutex("idle", leased.WithIdleHold(longest)),
			"the longest prefix":    newClient(t, s, leased.WithKeyPrefix(strings.Repeat("p", 256))).Mutex(s.Prefix),
		} {
			if err := mu.Do(t.Context(), func(context.Context) error { return nil }); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
}

func TestARedisClientThatCannotKeepLocksIsRefused(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	for what, rdb := range map[string]redis.UniversalClient{
		"nil":         nil,
		"nil Client":  (*redis.Client)(nil),
		"nil Cluster": (*redis.ClusterClient)(nil),
		"nil Ring":    (*redis.Ring)(nil),
		"Ring":        ring,
	} {
		if c, err := leased.New(rdb); c != nil || !errors.Is(err, leased.ErrInvalidOption) {
			t.Errorf("%s: %v, %v", what, c, err)
		}
		one := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		defer one.Close()
		c, err := leased.NewQuorum([]redis.UniversalClient{one, rdb, rdb})
		if c != nil || !errors.Is(err, leased.ErrInvalidOption) || !strings.Contains(err.Error(), "server 2 of the quorum") {
			t.Errorf("%s, in a quorum: %v, %v", what, c, err)
		}
	}
}

func TestNewSaysThatARedisClientKeepsAHungSentinel(t *testing.T) {
	for _, c := range []struct {
		read, dial time.Duration
		retries    int
		warns      bool
	}{
		{0, 0, 0, true}, // the defaults: 5 s, 5 s, 3
		{time.Second, 0, 0, true},
		{time.Second, 0, -1, false},
		{2 * time.Second, 5 * time.Second, -1, false}, // the values that the line names
		{time.Second, 2 * time.Second, -1, true},
		{time.Second, 5 * time.Second, 1, false},
		{-1, 0, -1, true},
	} {
		o := &redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{"127.0.0.1:1"}, ContextTimeoutEnabled: true, ReadTimeout: c.read, DialTimeout: c.dial, MaxRetries: c.retries}
		rdb := redis.NewFailoverClient(o)
		defer rdb.Close()
		var out logs
		client, err := leased.New(rdb, out.option())
		if err != nil {
			t.Fatal(err)
		}
		if err := client.Close(); err != nil { // waits for the log
			t.Error(err)
		}
		if n := out.count(slog.LevelWarn, "a Sentinel that hangs"); (n == 1) != c.warns || n > 1 {
			t.Errorf("%+v: %d lines, %q", c, n, out.messages())
		}
	}
	var out logs
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true})
	defer rdb.Close()
	client, err := leased.New(rdb, out.option())
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
	if len(out.messages()) != 0 {
		t.Errorf("of a plain client, it says %q", out.messages())
	}
}

// go-redis would give the timeout of the WAIT as the error of the acquire before it, which was answered.
func TestReplicasAreNotWaitedForLongerThanTheRedisClientReads(t *testing.T) {
	for _, c := range []struct {
		read, wait time.Duration
		refused    bool
	}{
		{500 * time.Millisecond, 500 * time.Millisecond, true},
		{500 * time.Millisecond, time.Second, true},
		{501 * time.Millisecond, 500 * time.Millisecond, false},
		{0, time.Second, false},  // the default of 5 s
		{-1, time.Second, false}, // no limit
		{-2, time.Second, false},
	} {
		one := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ReadTimeout: c.read, ContextTimeoutEnabled: true})
		defer one.Close()
		cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, ReadTimeout: c.read, ContextTimeoutEnabled: true})
		defer cluster.Close()
		for _, rdb := range []redis.UniversalClient{one, cluster} {
			client, err := leased.New(rdb, leased.WithReplicas(1, c.wait))
			if client != nil {
				client.Close()
			}
			if c.refused != (err != nil) || c.refused && !errors.Is(err, leased.ErrInvalidOption) {
				t.Errorf("%T, ReadTimeout %v, wait %v: %v", rdb, c.read, c.wait, err)
			}
		}
	}
}

// A replica has the mark of its server, and may lack a lease.
func TestAQuorumRefusesRedisClientsThatFollowSentinel(t *testing.T) {
	var rdbs []redis.UniversalClient
	for i := range 3 {
		rdb := redis.NewClient(&redis.Options{Addr: fmt.Sprint("127.0.0.1:", 1+i)})
		if i == 2 {
			rdb = redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{"127.0.0.1:1"}})
		}
		defer rdb.Close()
		rdbs = append(rdbs, rdb)
	}
	c, err := leased.NewQuorum(rdbs)
	if c != nil || !errors.Is(err, leased.ErrInvalidOption) || !strings.Contains(err.Error(), "server 3 of the quorum") {
		t.Errorf("%v, %v", c, err)
	}
}

func TestAQuorumRefusesWhatItCannotBe(t *testing.T) {
	clients := func(n int) (all []redis.UniversalClient) {
		for i := range n {
			rdb := redis.NewClient(&redis.Options{Addr: fmt.Sprint("127.0.0.1:", 1+i)})
			t.Cleanup(func() { rdb.Close() })
			all = append(all, rdb)
		}
		return all
	}
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:9"}})
	defer cluster.Close()
	for what, c := range map[string]struct {
		rdbs []redis.UniversalClient
		opt  leased.Option
	}{
		"no server":                         {nil, nil},
		"one server":                        {clients(1), nil},
		"two servers":                       {clients(2), nil},
		"four servers":                      {clients(4), nil},
		"eight servers":                     {clients(8), nil},
		"a Cluster":                         {append(clients(2), cluster), nil},
		"no client":                         {append(clients(2), nil), nil},
		"replicas":                          {clients(3), leased.WithReplicas(1, time.Second)},
		"a TTL longer than the quarantine":  {clients(3), leased.WithTTL(time.Minute + time.Millisecond)},
		"a quarantine shorter than the TTL": {clients(3), leased.WithQuarantine(29 * time.Second)},
		"no quarantine":                     {clients(3), leased.WithQuarantine(0)},
		"a quarantine of 99 ms":             {clients(3), leased.WithQuarantine(100*time.Millisecond - 1)},
		"a quarantine of over 30 days":      {clients(3), leased.WithQuarantine(30*24*time.Hour + 1)},
	} {
		var opts []leased.Option
		if c.opt != nil {
			opts = append(opts, c.opt)
		}
		if got, err := leased.NewQuorum(c.rdbs, opts...); got != nil || !errors.Is(err, leased.ErrInvalidOption) {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	if c, err := leased.New(clients(1)[0], leased.WithQuarantine(time.Minute)); c != nil || !errors.Is(err, leased.ErrInvalidOption) {
		t.Errorf("a quarantine of one server: %v, %v", c, err)
	}
	const shortest, longest = 100 * time.Millisecond, 30 * 24 * time.Hour
	for _, d := range []time.Duration{shortest, longest} {
		c, err := leased.NewQuorum(clients(3), leased.WithTTL(shortest), leased.WithQuarantine(d))
		if err != nil {
			t.Errorf("a quarantine of %v: %v", d, err)
			continue
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A server that has lost its data votes when the quarantine is over. By then every lease that it had must
// have ended.
func TestALockOfAQuorumRefusesATTLLongerThanTheQuarantine(t *testing.T) {
	onMortals(t, func(t *testing.T, _ []*mortal, open func(...leased.Option) *leased.Client) {
		c := open()
		refusesAll(t, c.Mutex("x", leased.WithTTL(time.Minute+time.Millisecond)), leased.ErrInvalidOption)
		unlock(t, lock(t, c.Mutex("x", leased.WithTTL(time.Minute))))
		longer := open(leased.WithQuarantine(time.Hour))
		unlock(t, lock(t, longer.Mutex("x", leased.WithTTL(time.Hour))))
	})
}

// A server that is there twice would have two votes, and five servers would bear one failure less.
func TestAQuorumRefusesTwoClientsOfOneServer(t *testing.T) {
	at := func(addr string, db int) redis.UniversalClient {
		rdb := redis.NewClient(&redis.Options{Addr: addr, DB: db})
		t.Cleanup(func() { rdb.Close() })
		return rdb
	}
	first, second := at("127.0.0.1:1", 0), at("127.0.0.1:2", 0)
	for what, third := range map[string]redis.UniversalClient{
		"the same client":             first,
		"another client":              at("127.0.0.1:1", 0),
		"another database":            at("127.0.0.1:1", 1),
		"a type that embeds a client": around.Node{Client: first.(*redis.Client)},
	} {
		c, err := leased.NewQuorum([]redis.UniversalClient{first, second, third})
		if c != nil || !errors.Is(err, leased.ErrInvalidOption) ||
			!strings.Contains(err.Error(), "servers 1 and 3 of the quorum are one server: both have the address 127.0.0.1:1") {
			t.Errorf("%s: %v, %v", what, c, err)
		}
	}
}

func TestLocksWhoseNamesLookLikeAnothersHelpersAreRefusedOrApart(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		tried := 0
		for _, end := range []string{"queue", "readers", "waiters", "meta"} {
			for _, names := range [][2]string{
				{"job:{42}", "job:{42}:" + end}, {"job", "job:{job}:" + end}, {"job", "job:{job}"}, {"job:", "job:{job}"},
				{"job:{42}", "job:{42}:" + end + "s"}, {"job", "job:" + end}, {"job", "job:{job}:"},
			} {
				for _, shared := range []bool{false, true} {
					c, second := newClient(t, s), newClient(t, s).RWMutex(names[1])
					take := second.LockContext
					if shared {
						take = second.RLockContext
					}
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					l, err := take(ctx)
					if errors.Is(err, leased.ErrInvalidName) {
						cancel()
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					tried++
					other, err := c.Mutex(names[0]).LockContext(ctx)
					if err != nil {
						t.Errorf("with %q locked, %q cannot be: %v", names[1], names[0], err)
					} else {
						unlock(t, other)
					}
					if err := l.Unlock(); err != nil {
						t.Errorf("locking %q took %q away: %v", names[0], names[1], err)
					}
					cancel()
					s.Mini.FlushAll()
				}
			}
		}
		if tried < 40 {
			t.Errorf("only %d pairs of names were tried", tried)
		}
	})
}
