package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestInspectShowsOwnerQueueAndToken(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, s redistest.Target) {
		rdb := s.NewClient(t)
		redistest.CheckLeaks(t, rdb, s.Prefix)
		inspect := func() string {
			t.Helper()
			got := invoke(t, "inspect", "invoice:42", "--redis", "redis://"+s.Addr, "--prefix", s.Prefix)
			if got.status != 0 || got.err != "" {
				t.Fatalf("status %d, stderr %q", got.status, got.err)
			}
			return got.out
		}
		client := func(label string) *leased.Client {
			t.Helper()
			c, err := leased.New(rdb, leased.WithKeyPrefix(s.Prefix), leased.WithOwner(label))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			return c
		}

		if got, want := inspect(), "lock    \"invoice:42\"\nstate   free\n"; got != want {
			t.Errorf("of a free lock:\n%swant:\n%s", got, want)
		}

		holder, waiter := client("holder"), client("waiter")
		lease, err := holder.Mutex("invoice:42").LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		waited := make(chan struct{})
		// Ended by cancel, waited for below.
		go func() {
			defer close(waited)
			waiter.Mutex("invoice:42").LockContext(ctx)
		}()
		var got string
		eventually(t, "the waiter has come to the queue", func() bool {
			got = inspect()
			return strings.Contains(got, "queue")
		})
		for _, want := range []string{
			"state   held\n", "owner   \"holder\", ", " s left, since ",
			"queue   1 process\n", "        1. \"waiter\"\n", fmt.Sprintf("token   %d\n", lease.Token()),
		} {
			if !strings.Contains(got, want) {
				t.Errorf("no %q in:\n%s", want, got)
			}
		}
		cancel()
		<-waited
		if err := lease.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

func TestInspectQuotesWhatOthersPutThere(t *testing.T) {
	server := redistest.MiniTCP(t)
	server.Set("job", "\x1b[2Jfake")
	got := invoke(t, "inspect", "--redis", "redis://"+server.Addr(), "job")
	want := "lock    \"job\"\nstate   held\nowner   another library (value \"\\x1b[2Jfake\"), never expires\n"
	if got.status != 0 || got.out != want {
		t.Fatalf("status %d, printed:\n%swant:\n%s", got.status, got.out, want)
	}
	if bad := invoke(t, "inspect", "--redis", "redis://"+server.Addr(), "a}b"); bad.status != 2 {
		t.Errorf("a bad name: status %d, stderr %q", bad.status, bad.err)
	}
	odd := invoke(t, "inspect", "--redis", "redis://"+server.Addr(), "--", "--odd")
	if odd.status != 0 || !strings.Contains(odd.out, `"--odd"`) {
		t.Errorf("a name that looks like a flag: status %d, %q %q", odd.status, odd.out, odd.err)
	}
}

// While a release with another format is rolled out, an operator must not look for a program that is not there.
func TestALaterVersionIsCalledThat(t *testing.T) {
	server := redistest.MiniTCP(t)
	server.Set("job", "leased2:w:someone")
	server.Set("job:{job}:meta", "leased2:1:1")
	for _, part := range []string{"queue", "waiters"} {
		if _, err := server.ZAdd("job:{job}:"+part, 1e15, "leased2:w:another"); err != nil {
			t.Fatal(err)
		}
	}
	at := "redis://" + server.Addr()
	for _, c := range []struct{ command, want string }{
		{"inspect", "owner   a later version of leased (value \"leased2:w:someone\")"},
		{"inspect", "1. another version of leased"},
		{"ls", "(a later version of leased)"},
		{"top --count 1", "(a later version of leased)"},
	} {
		args := append(strings.Fields(c.command), "--redis", at)
		if c.command == "inspect" {
			args = append(args, "job")
		}
		if got := invoke(t, args...); got.status != 0 || !strings.Contains(got.out, c.want) {
			t.Errorf("%s: status %d, printed:\n%s%swant %s", c.command, got.status, got.out, got.err, c.want)
		}
	}
	if got := invoke(t, "unlock", "--redis", at, "--force", "--yes", "job"); got.status != 0 || !strings.Contains(got.out+got.err, "from a later version of leased") {
		t.Errorf("unlock: status %d, printed:\n%s%s", got.status, got.out, got.err)
	}
}

func TestUnlockSaysThatTheOwnerWasQuicker(t *testing.T) {
	server := redistest.MiniTCP(t)
	server.Set("job", "foreign")
	server.Server().SetPreHook(func(_ *mini.Peer, cmd string, args ...string) bool {
		if cmd == "EVALSHA" && args[0] == redisserver.EvictScript.Sha {
			server.Del("job") // its owner unlocks it after the command has looked
		}
		return false
	})
	got := invoke(t, "unlock", "--redis", "redis://"+server.Addr(), "--force", "--yes", "job")
	if got.status != 0 || got.out != "\"job\" was unlocked before it was taken from another library.\n" {
		t.Errorf("status %d, printed:\n%s%s", got.status, got.out, got.err)
	}
}

// Redis calls the lock free then, and so does inspect: nothing else would tell why one process goes on waiting.
func TestUnlockSaysThatTheOwnersOwnCallersStillWait(t *testing.T) {
	server := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, server)
	unlock := func() string {
		t.Helper()
		got := invoke(t, "unlock", "--redis", "redis://"+server.Addr(), "--force", "--yes", "job")
		if got.status != 0 || got.err != "" {
			t.Fatalf("%+v", got)
		}
		return got.out
	}
	c, err := leased.New(rdb, leased.WithOwner("shop-b"), leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	for _, shared := range []bool{false, true} {
		taken := "\"job\" was taken from \"shop-b\".\nCallers of \"shop-b\" itself wait until it unlocks; if it never will, restart it.\n"
		take := c.RWMutex("job").LockContext
		if shared {
			taken = "\"job\" was taken from \"shop-b\".\nWriters of \"shop-b\" itself wait until its readers unlock; if they never will, restart it.\n"
			take = c.RWMutex("job").RLockContext
		}
		lease, err := take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := unlock(); got != taken {
			t.Errorf("shared %v: printed:\n%swant:\n%s", shared, got, taken)
		}
		<-lease.Context().Done()
		// Without this, what was printed would be wrong.
		if _, err := c.RWMutex("job").TryLockContext(t.Context()); !errors.Is(err, leased.ErrLocked) {
			t.Errorf("shared %v: another caller of the owner got %v", shared, err)
		}
		if err := lease.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("shared %v: %v", shared, err)
		}
	}

	server.Set("job", "foreign")
	if got, want := unlock(), "\"job\" was taken from another library.\n"; got != want {
		t.Errorf("printed:\n%swant:\n%s", got, want)
	}
	if got := leftText([]leased.Owner{{Client: "a", Unlocked: true}, {Value: "x"}}); got != "" {
		t.Errorf("of owners without callers: %q", got)
	}
	if got := leftText([]leased.Owner{{Client: "a", Shared: true}, {Client: "b", Shared: true}}); !strings.HasPrefix(got, "Writers of these processes wait ") {
		t.Errorf("of readers of two processes: %q", got)
	}
}

func TestReadersAreDescribedAsOne(t *testing.T) {
	var out strings.Builder
	describe(&out, leased.Info{
		Name:    "catalog",
		Owners:  []leased.Owner{{Client: "a", Shared: true, TTL: 1500 * time.Millisecond}, {Client: "b", Shared: true, TTL: time.Second}},
		Waiting: []leased.Waiter{{Client: "c"}, {Client: "d", Shared: true}},
		Queue:   5,
	})
	want := `lock    "catalog"
state   shared by readers of 2 processes
owner   "a", 1.50 s left
owner   "b", 1.00 s left
queue   5 processes
        1. "c"
        2. "d", to read
        and 3 more
`
	if out.String() != want {
		t.Fatalf("printed:\n%swant:\n%s", out.String(), want)
	}
}
