package leased_test

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

func TestNewAndHandlesDoNoIO(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var dials atomic.Int32
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			direct := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials.Add(1)
				return direct(ctx, network, addr)
			}
		}))
		mu := c.Mutex("x")
		c.RWMutex("y").RLocker()
		time.Sleep(time.Hour)
		if n := dials.Load(); n != 0 {
			t.Errorf("%d connections before the first lock", n)
		}
		unlock(t, lock(t, mu))
		if dials.Load() == 0 {
			t.Error("no connection after it: nothing is shown")
		}
	})
}

// Without ContextTimeoutEnabled the commands of locks go through a clone of the
// Redis client, which go-redis makes without its hooks.
func TestHooksOfARedisClientThatHeedsDeadlinesSeeTheCommandsOfLocks(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		var seen redistest.Counter
		s.hook(rdb, &seen)
		c := clientOn(t, s, rdb)
		unlock(t, lock(t, c.Mutex("x")))
		if n := seen.Commands(); n["evalsha"] < 2 {
			t.Errorf("an acquire and a release were seen as %v", n)
		}
	})
}

func TestATypeAroundARedisClientKeepsProofAndDeadlinesOrThatIsLogged(t *testing.T) {
	node := func(c *redis.Client) redis.UniversalClient { return around.Node{Client: c} }
	unknown := func(c *redis.Client) redis.UniversalClient { return around.Any{UniversalClient: c} }
	for what, c := range map[string]struct {
		wrap   func(*redis.Client) redis.UniversalClient
		bounds bool // ContextTimeoutEnabled
		flag   string
		logged int
	}{
		"a node's":                       {node, true, ":c:", 0},
		"a node's that ignores contexts": {node, false, ":c:", 1},
		"one of which nothing is known":  {unknown, true, ":u:", 1},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = c.bounds })
				client := clientOn(t, s, c.wrap(rdb), out.option())
				unlock(t, lock(t, client.Mutex("warm")))
				synctest.Wait()
				l := lock(t, client.Mutex("x"))
				if id := s.value(t, "x"); !strings.Contains(id, c.flag) {
					t.Errorf("the id %q does not say %q", id, c.flag)
				}
				unlock(t, l)
				if n := out.count(slog.LevelWarn, "deadlines of their own"); n != c.logged {
					t.Errorf("logged %d times: %q", n, out.messages())
				}
			})
		})
	}
}

// A Cluster's client is not cloned.
func TestThatAClustersCommandsAreUnboundedIsLogged(t *testing.T) {
	for _, c := range []struct {
		bounds      bool
		read, write time.Duration
		lines       int
	}{{false, 0, 0, 1}, {true, 0, 0, 0}, {true, -1, -1, 0}, {true, -2, 0, 1}, {true, 0, -2, 1}} {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: []string{"127.0.0.1:1"}, ContextTimeoutEnabled: c.bounds, ReadTimeout: c.read, WriteTimeout: c.write,
		})
		var out logs
		locks, err := leased.New(rdb, out.option())
		if err != nil {
			t.Fatal(err)
		}
		locks.Close()
		must(t, rdb.Close())
		if n := out.count(slog.LevelWarn, "deadlines of their own"); n != c.lines {
			t.Errorf("%+v: logged %d times", c, n)
		}
	}
}

// What comes before a command on a connection that is dialed has 2 s, however often a lock asks, although
// the user's own commands have longer. Dialing itself goes on for a later try.
func TestVirtualAConnectionWhoseOnConnectOrCredentialsTakeMoreThan2sNeverCarriesALock(t *testing.T) {
	const under, over = 1900 * time.Millisecond, 2100 * time.Millisecond
	sleep := func(ctx context.Context, d time.Duration) error {
		select {
		case <-time.After(d): // of virtual time
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	const dialing = "a dialer"
	for what, slow := range map[string]func(*redis.Options, time.Duration){
		dialing: func(o *redis.Options, d time.Duration) {
			o.DialTimeout = time.Minute
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if err := sleep(ctx, d); err != nil {
					return nil, err
				}
				return dial(ctx, network, addr)
			}
		},
		"OnConnect": func(o *redis.Options, d time.Duration) {
			o.OnConnect = func(ctx context.Context, _ *redis.Conn) error { return sleep(ctx, d) }
		},
		"a provider of credentials": func(o *redis.Options, d time.Duration) {
			o.CredentialsProviderContext = func(ctx context.Context) (string, string, error) { return "", "", sleep(ctx, d) }
		},
	} {
		for takes, enters := range map[time.Duration]bool{under: true, over: false} {
			t.Run(what+" in "+takes.String(), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
						o.ReadTimeout = time.Minute
						slow(o, takes)
					}))
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					l, err := c.Mutex("x").LockContext(ctx)
					if (err == nil) != (enters || what == dialing) {
						t.Errorf("LockContext returned %v", err)
					}
					if err == nil {
						// At the moment of the grant a quorum sends more to each server, and has one connection
						// for it. A release that does not find that one free has to dial.
						time.Sleep(5 * time.Second) // of virtual time
						unlock(t, l)
					}
					_ = c.Close() // no cancel gets an answer either
				})
			})
		}
	}
}

func TestATypeAroundARingIsRefused(t *testing.T) {
	if _, err := leased.New(around.Ring{Ring: redis.NewRing(&redis.RingOptions{})}); err == nil {
		t.Error("accepted")
	}
}

func TestAKeyPrefixMayBeginAHashTagThatNamesEnd(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for prefix, name := range map[string]string{"{app}:": "x", "{app:": "x}", "app{": "x}y"} {
			unlock(t, lock(t, newClient(t, s, leased.WithKeyPrefix(prefix)).Mutex(name)))
		}
	})
}

func TestClientsWhosePrefixesAndNamesMakeOneKeyExcludeButDoNotWakeEachOther(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for _, prefixes := range [][2]string{{"a:", ""}, {"", "a:"}} {
			name := func(i int) string { return strings.TrimPrefix("a:b", prefixes[i]) }
			held := lock(t, newClient(t, s, leased.WithKeyPrefix(prefixes[0])).Mutex(name(0)))
			waiter := newClient(t, s, leased.WithKeyPrefix(prefixes[1])).Mutex(name(1))
			got := make(chan *leased.Lease)
			go func() { got <- lock(t, waiter) }()
			time.Sleep(10 * time.Second)
			select {
			case <-got:
				t.Fatal("two owners")
			default:
			}
			unlock(t, held)
			released := time.Now()
			l := <-got
			if after := time.Since(released); after == 0 || after > 5*time.Second {
				t.Errorf("entered after %v", after)
			}
			unlock(t, l)
		}
	})
}

func TestAPolicyThatIsMissingLaterIsLoggedAndReplaced(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		made := 0
		c := newClient(t, s, out.option(), leased.WithBackOff(func() leased.BackOff {
			if made++; made > 1 {
				return nil
			}
			return leisurely{}
		}))
		s.Mini.SetError("LOADING Redis is loading")
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if _, err := c.Mutex("x").LockContext(ctx); err == nil {
			t.Error("there is no Redis")
		}
		s.Mini.SetError("")
		if n := out.count(slog.LevelError, "factory returned nil"); n != 1 {
			t.Errorf("logged %d times: %q", n, out.messages())
		}
		if n := out.count(slog.LevelError, "panicked"); n != 0 {
			t.Errorf("nothing has replaced it: %q", out.messages())
		}
	})
}

func TestAClosedRedisClientIsAnErrorAtOnce(t *testing.T) {
	for _, own := range []bool{true, false} {
		inVirtualTime(t, func(t *testing.T, s place) {
			var out logs
			rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = own })
			c, err := s.open(t, rdb, out.option(), leased.WithReleaseTimeout(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			l := lock(t, c.Mutex("held"))
			began := time.Now()
			atOnce := func(what string) {
				t.Helper()
				if took := time.Since(began); took != 0 {
					t.Errorf("%s took %v", what, took)
					began = time.Now()
				}
			}
			for _, one := range s.alike(rdb) {
				must(t, one.Close())
			}
			atOnce("Close of the Redis client")
			_, err = c.Mutex("x").LockContext(context.Background())
			isAll(t, err, leased.ErrNotAcquired, leased.ErrClosed, redis.ErrClosed)
			if err != nil && !strings.Contains(err.Error(), "the Redis client is closed") {
				t.Error(err)
			}
			atOnce("LockContext")
			_, err = c.Mutex("x").TryLockContext(context.Background())
			isAll(t, err, redis.ErrClosed)
			atOnce("TryLockContext")
			for what, f := range map[string]func(){"Lock": c.Mutex("x").Lock, "RLock": c.RWMutex("x").RLock, "TryLock": func() { c.Mutex("x").TryLock() }} {
				got, _ := panics(f).(error)
				isAll(t, got, redis.ErrClosed)
				atOnce(what)
			}
			isAll(t, l.Unlock(), leased.ErrNotReleased, redis.ErrClosed)
			atOnce("Unlock")
			_, err = c.Inspect(context.Background(), "x")
			isAll(t, err, redis.ErrClosed)
			atOnce("Inspect")
			synctest.Wait() // a separate goroutine writes the log
			if n := out.count(slog.LevelError, "closed before"); n != 1 {
				t.Errorf("logged %q", out.messages())
			}
		})
	}
}

// The Redis client is closed while callers wait for another process.
func TestWaitersLearnThatTheRedisClientWasClosed(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		theirs := lock(t, newClient(t, s).Mutex("x"))
		defer unlock(t, theirs)
		var ended []chan any
		for _, wait := range []func(c *leased.Client) any{
			func(c *leased.Client) any { return panics(c.Mutex("x").Lock) },
			func(c *leased.Client) any { return panics(c.RWMutex("x").RLock) },
			func(c *leased.Client) any { _, err := c.Mutex("x").LockContext(context.Background()); return err },
		} {
			rdb := s.connect(t)
			c, err := s.open(t, rdb, leased.WithLogger(slog.New(slog.DiscardHandler)))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			done := make(chan any, 1)
			go func() { done <- wait(c) }() // ended by the closing, waited for below
			ended = append(ended, done)
			s.queued(t, "x", int64(len(ended)))
			for _, one := range s.alike(rdb) {
				must(t, one.Close())
			}
		}
		for i, done := range ended {
			select {
			case what := <-done:
				err, _ := what.(error)
				isAll(t, err, redis.ErrClosed, leased.ErrClosed)
			case <-time.After(5 * time.Second): // the re-checks of those that wait, and a little more
				t.Errorf("caller %d waits on", i)
			}
		}
	})
}

func TestAnExhaustedPoolIsSaidToBeExhausted(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.PoolSize = 2 })
		c := clientOn(t, s, rdb)
		unlock(t, lock(t, c.Mutex("x")))
		time.Sleep(time.Second)
		var taken []*redis.Conn
		for _, one := range s.alike(rdb) {
			for range 2 {
				conn := one.Conn()
				must(t, conn.Ping(context.Background()).Err())
				taken = append(taken, conn)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, context.DeadlineExceeded, redis.ErrPoolTimeout)
		if err != nil && !strings.Contains(err.Error(), "pool of 2 is exhausted") {
			t.Error(err)
		}
		for _, conn := range taken {
			must(t, conn.Close())
		}
		time.Sleep(time.Minute)
	})
}

// A dial, TLS and the greeting have to fit into the time of a command, which is 2 s.
func TestVirtualHowFarAwayAServerMayBe(t *testing.T) {
	for _, c := range []struct {
		what   string
		dial   time.Duration // how many round trips a dial takes, with TLS
		trip   time.Duration
		lean   bool // the greeting has as few round trips as it can
		locked bool
	}{
		{"plain", 1, 490 * time.Millisecond, false, true},
		{"plain", 1, 510 * time.Millisecond, false, false},
		{"TLS 1.3", 2, 390 * time.Millisecond, false, true},
		{"TLS 1.3", 2, 410 * time.Millisecond, false, false},
		{"TLS 1.2", 3, 325 * time.Millisecond, false, true},
		{"TLS 1.2", 3, 340 * time.Millisecond, false, false},
		{"plain", 1, 600 * time.Millisecond, true, true},
		{"TLS 1.3", 2, 410 * time.Millisecond, true, true},
		{"TLS 1.2", 3, 340 * time.Millisecond, true, true},
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			if s.members != nil {
				t.Skip("about the connections to one server")
			}
			var trip atomic.Int64
			trip.Store(int64(c.trip))
			rdb := s.connect(t, func(o *redis.Options) {
				// Without a type, it would be looked up by DNS, which a bubble cannot do.
				o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeAuto, EndpointType: maintnotifications.EndpointTypeNone}
				if c.lean {
					o.DisableIdentity = true
					o.MaintNotificationsConfig.Mode = maintnotifications.ModeDisabled
				}
				wrapConns(o, func(conn net.Conn) net.Conn {
					time.Sleep(c.dial * time.Duration(trip.Load())) // as long as a dial takes
					return &faraway{Conn: conn, delay: time.Duration(trip.Load())}
				})
			})
			mu := clientOn(t, s, rdb).Mutex("x")
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			l, err := mu.LockContext(ctx)
			if c.locked != (err == nil) {
				t.Errorf("%s over %v, lean %v: %v", c.what, c.trip, c.lean, err)
			}
			if err == nil {
				_ = l.Unlock() // which may say that it goes on
			}
			trip.Store(0)
			time.Sleep(time.Minute) // what was given up is canceled, and what goes on ends
		})
	}
}
