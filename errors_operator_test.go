package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// refusals are servers that only an operator can make take our commands.
var refusals = map[string]struct {
	args   []string
	user   []any // of ACL SETUSER
	change func(o *redis.Options)
	want   string
	mend   func(t *testing.T, admin *redis.Client)
}{
	"no password": {
		args: []string{"--requirepass", "secret"},
		want: "auth", // NOAUTH, or that an unauthenticated client may not send so long a command
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.ConfigSet(context.Background(), "requirepass", "").Err())
		},
	},
	"wrong password": {
		args:   []string{"--requirepass", "secret"},
		change: func(o *redis.Options) { o.Password = "wrong" },
		want:   "WRONGPASS",
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.ConfigSet(context.Background(), "requirepass", "wrong").Err())
		},
	},
	"no scripts": {
		user:   []any{"on", ">pw", "~*", "&*", "+@all", "-@scripting"},
		change: func(o *redis.Options) { o.Username, o.Password = "app", "pw" },
		want:   "NOPERM",
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.Do(context.Background(), "ACL", "SETUSER", "app", "+@scripting").Err())
		},
	},
	"no keys": {
		user:   []any{"on", ">pw", "~other:*", "&*", "+@all"},
		change: func(o *redis.Options) { o.Username, o.Password = "app", "pw" },
		want:   "NOPERM",
		mend: func(t *testing.T, admin *redis.Client) {
			must(t, admin.Do(context.Background(), "ACL", "SETUSER", "app", "~*").Err())
		},
	},
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhatOnlyAnOperatorCanMendIsReturnedAtOnceAndWaitedForByLock(t *testing.T) {
	t.Parallel()
	for what, c := range refusals {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			server := redistest.Server(t, c.args...)
			admin := server.Client(func(o *redis.Options) {
				if c.args != nil {
					o.Password = "secret"
				}
			})
			if c.user != nil {
				must(t, admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, c.user...)...).Err())
			}
			s := place{Target: redistest.Target{Name: what, Addr: server.Addr, Real: true, Prefix: "p:"}, rdb: admin}
			redistest.CheckLeaks(t, nil, s.Prefix)
			var out logs
			var change []func(*redis.Options)
			if c.change != nil {
				change = append(change, c.change)
			}
			client := clientOn(t, s, s.connect(t, change...), out.option(),
				leased.WithBackOff(func() leased.BackOff { return every(10 * time.Millisecond) }))

			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_, err := client.Mutex("x").LockContext(ctx)
			if !errors.Is(err, leased.ErrNotAcquired) || errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(strings.ToLower(err.Error()), strings.ToLower(c.want)) {
				t.Errorf("LockContext did not return at once with %s: %v", c.want, err)
			}
			if client.Mutex("x").TryLock() {
				t.Fatal("TryLock succeeded")
			}

			locked := make(chan any, 1)
			go func() { locked <- panics(client.Mutex("x").Lock) }() // ended by Close at the latest
			sent := client.Stats().Commands
			eventually(t, "Lock tries again and again", func() bool { return client.Stats().Commands > sent+5 })
			if !open(locked) {
				t.Fatal("Lock returned")
			}
			// A connection that is refused may break instead, which is another trouble, and then it is
			// refused again.
			broke := out.count(slog.LevelWarn, "does not answer")
			if n := out.count(slog.LevelError, "operator"); n < 1 || n > 1+broke {
				t.Errorf("logged %d times at Error: %q", n, out.messages())
			}
			c.mend(t, admin)
			if p := closesSoon(t, "Lock gets in when it is mended", locked); p != nil {
				t.Fatalf("Lock panicked with %v", p)
			}
			client.Mutex("x").Unlock()
			if n := admin.Exists(context.Background(), "p:x").Val(); n != 0 {
				t.Error("not released")
			}
		})
	}
}

// A script that lacks the right to one of its commands has carried out those before it.
func TestWhatAScriptLeavesThatMayNotCallACommandIsCanceled(t *testing.T) {
	t.Parallel()
	for command, take := range map[string]func(*leased.Client) error{
		"set": func(c *leased.Client) error {
			_, err := c.RWMutex("x").TryRLockContext(context.Background())
			return err
		},
		"zremrangebyscore": func(c *leased.Client) error {
			_, err := c.RWMutex("x").RLockContext(context.Background())
			return err
		},
		"pexpire": func(c *leased.Client) error { // it waits
			_, err := c.Mutex("y").LockContext(context.Background())
			return err
		},
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			other := lock(t, newClient(t, s).Mutex("y"))
			c := clientOn(t, s, s.connect(t, app))
			unlock(t, lock(t, c.Mutex("first"))) // it has subscribed
			acl("-" + command)
			err := take(c)
			isAll(t, err, leased.ErrNotAcquired)
			if !strings.Contains(err.Error(), "can't run this command") && !strings.Contains(err.Error(), "ACL failure in script") {
				t.Fatal(err)
			}
			acl("+" + command)
			eventually(t, "nothing of the request is left", func() bool {
				return s.rdb.Exists(context.Background(), "p:x:{p:x}:readers", "p:y:{p:y}:queue").Val() == 0
			})
			if l, err := newClient(t, s).Mutex("x").TryLockContext(context.Background()); err != nil {
				t.Error(err)
			} else {
				unlock(t, l)
			}
			unlock(t, other)
		})
	}
}

// every is a policy without growth.
type every time.Duration

func (e every) NextBackOff() time.Duration { return time.Duration(e) }

func TestWithoutChannelPermissionWaitingMeansPolling(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	admin := server.Client()
	must(t, admin.Do(context.Background(), "ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all").Err())
	s := place{Target: redistest.Target{Name: "acl", Addr: server.Addr, Real: true, Prefix: "p:"}, rdb: admin}
	redistest.CheckLeaks(t, admin, s.Prefix)
	var out logs
	deaf := func() *leased.Client {
		rdb := s.connect(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
		return clientOn(t, s, rdb, out.option(), leased.WithTTL(time.Hour))
	}
	a := deaf()
	l := lock(t, a.Mutex("x"))
	eventually(t, "the refused subscription is warned of", func() bool { return len(out.messages()) > 0 })

	b := deaf()
	waiter := locking(t, b.Mutex("x"))
	s.queued(t, "x", 1)
	sent := b.Stats().Commands
	eventually(t, "the waiter polls", func() bool { return b.Stats().Commands >= sent+2 })
	unlock(t, l)
	unlock(t, closesSoon(t, "the waiter finds out, not by the end of a TTL", waiter))
	eventually(t, "both have warned of their subscription", func() bool { return out.count(slog.LevelWarn, "subscribe") >= 2 })
	if n := out.count(slog.LevelWarn, "subscribe"); n != 2 {
		t.Errorf("two clients warned %d times of the subscription: %q", n, out.messages())
	}
	if n := len(out.messages()); n > 4 { // and at most once of publishing
		t.Errorf("warned too often: %q", out.messages())
	}

	// One that may subscribe is not held up by one that may not publish.
	hearing := newClient(t, s)
	l = lock(t, a.Mutex("x"))
	waiter = locking(t, hearing.Mutex("x"))
	s.queued(t, "x", 1)
	unlock(t, l)
	unlock(t, closesSoon(t, "a hearing waiter gets in after a mute owner", waiter))

	// A place behind readers of one's own needs no messages.
	reader := take(t, a.RWMutex("x").RLockContext)
	writer := taking(t, a.RWMutex("x").LockContext)
	s.queued(t, "x", 1)
	later := taking(t, b.RWMutex("x").RLockContext)
	s.queued(t, "x", 2)
	unlock(t, reader)
	unlock(t, closesSoon(t, "the writer gets in after its own readers", writer))
	unlock(t, closesSoon(t, "the later reader finds out", later))
}

// onAppServer starts a server with a user "app" who may do everything, and returns acl,
// which changes that.
func onAppServer(t *testing.T) (s place, acl func(rules ...any), app func(*redis.Options)) {
	t.Helper()
	server := redistest.Server(t)
	admin := server.Client()
	acl = func(rules ...any) {
		t.Helper()
		must(t, admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, rules...)...).Err())
	}
	acl("on", ">pw", "~*", "&*", "+@all")
	s = place{Target: redistest.Target{Name: "acl", Addr: server.Addr, Real: true, Prefix: "p:"}, rdb: admin}
	redistest.CheckLeaks(t, admin, s.Prefix)
	return s, acl, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }
}

func TestADowngradeThatOnlyAnOperatorCanMendIsWaitedForAsLongAsItsContextAndItsLeaseLast(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		forbid, allow []any
		renewed       bool // renewals are not forbidden
	}{
		"no scripts":     {forbid: []any{"-@scripting"}, allow: []any{"+@scripting"}},
		"no helper keys": {forbid: []any{"resetkeys", "~p:x"}, allow: []any{"~*"}, renewed: true},
		"no sorted sets": {forbid: []any{"-@sortedset"}, allow: []any{"+@sortedset"}, renewed: true},
		"no ZADD":        {forbid: []any{"-zadd"}, allow: []any{"+zadd"}, renewed: true},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			ttl := 20 * time.Second
			if c.renewed {
				ttl = 6 * time.Second
			}
			var out logs
			client := clientOn(t, s, s.connect(t, app), out.option(), leased.WithTTL(ttl),
				leased.WithBackOff(func() leased.BackOff { return every(20 * time.Millisecond) }))
			l := take(t, client.RWMutex("x").LockContext)
			token := l.Token()
			acl(c.forbid...)
			const wait = 200 * time.Millisecond
			strain := redistest.NewStrain(t)
			ctx, cancel := context.WithTimeout(context.Background(), wait)
			defer cancel()
			began := time.Now()
			isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
			if took := time.Since(began); took > wait+time.Second+strain.Since(began) {
				t.Errorf("returned after %v", took)
			}
			if c.renewed {
				renewals := client.Stats().Renewals
				eventually(t, "it is renewed", func() bool { return client.Stats().Renewals > renewals+1 })
			}
			if newClient(t, s).RWMutex("x").TryLock() {
				t.Fatal("a writer got in")
			}
			if l.Context().Err() != nil || l.Token() != token {
				t.Errorf("%v, token %d became %d", context.Cause(l.Context()), token, l.Token())
			}
			// A connection that is refused may break instead, which is another trouble, and then it is
			// refused again.
			broke := out.count(slog.LevelWarn, "does not answer")
			if n := out.count(slog.LevelError, "operator"); n < 1 || n > 1+broke {
				t.Errorf("logged %d times at Error: %q", n, out.messages())
			}

			acl(c.allow...)
			downgrade(t, l)
			if o := inspect(t, newClient(t, s), "x").Owners; len(o) != 1 || !o[0].Shared || l.Token() <= token {
				t.Errorf("owners %+v, token %d after %d", o, l.Token(), token)
			}
			unlock(t, l)
			if !s.clean(t, "x") {
				t.Error("something is left")
			}
		})
	}
}

// Here the permission stays away for as long as the lease lasts.
func TestALeaseWhoseDowngradeIsForbiddenIsUnlockedAllTheSame(t *testing.T) {
	t.Parallel()
	for what, forbid := range map[string]string{"half-way": "-zadd", "from the start": "-zcard"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			client := clientOn(t, s, s.connect(t, app), leased.WithReleaseTimeout(time.Second))
			l := take(t, client.RWMutex("x").LockContext)
			acl(forbid)
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			isAll(t, l.Downgrade(ctx), context.DeadlineExceeded)
			err := l.Unlock()
			if err != nil && !errors.Is(err, leased.ErrNotReleased) {
				t.Error(err)
			}
			acl("+@all")
			s.becomesClean(t, "x")
			unlock(t, take(t, newClient(t, s).RWMutex("x").LockContext))
		})
	}
}

// The readers behind it become owners and get no message.
func TestWithoutChannelPermissionReadersFindOutThatAWriterBecameAReader(t *testing.T) {
	t.Parallel()
	s, acl, app := onAppServer(t)
	acl("resetchannels")
	mute, hearing := clientOn(t, s, s.connect(t, app), leased.WithTTL(time.Hour)), newClient(t, s, leased.WithTTL(time.Hour))
	l := take(t, mute.RWMutex("x").LockContext)
	reader := taking(t, hearing.RWMutex("x").RLockContext)
	s.queued(t, "x", 1)
	downgrade(t, l)
	r := closesSoon(t, "the reader finds out, not by the end of a TTL", reader)
	if o := inspect(t, hearing, "x").Owners; len(o) != 2 {
		t.Errorf("owners: %+v", o)
	}
	unlock(t, l)
	unlock(t, r)
}

// With the options that docs/deployments.md names, the error says what is wrong with the Sentinels.
func TestThatNoSentinelCanBeReachedIsSaid(t *testing.T) {
	t.Parallel()
	for want, sentinels := range map[string][]string{
		"all sentinels specified in configuration are unreachable": {"127.0.0.1:1", "127.0.0.1:1"},
		"it is no Sentinel": {redistest.Server(t).Addr, "127.0.0.1:1"},
	} {
		rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main", SentinelAddrs: sentinels,
			ReadTimeout: 2 * time.Second, MaxRetries: -1, DialerRetries: 1})
		t.Cleanup(func() { _ = rdb.Close() })
		c, err := leased.New(rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = c.Mutex("x").LockContext(ctx)
		cancel()
		if isAll(t, err, leased.ErrNotAcquired); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("LockContext: %v", err)
		}
	}
}
