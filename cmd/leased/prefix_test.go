//go:build unix

package main

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// holds takes a lock for a client with a prefix, and returns once its messages arrive.
func holds(t *testing.T, rdb *redis.Client, prefix, name, label string) *leased.Lease {
	t.Helper()
	client, err := leased.New(rdb, leased.WithKeyPrefix(prefix), leased.WithOwner(label))
	if err != nil {
		t.Fatal(err)
	}
	lease, err := client.Mutex(name).LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		lease.Unlock() // a test may have had it evicted
		client.Close()
	})
	id, err := rdb.Get(t.Context(), prefix+name).Result()
	if err != nil {
		t.Fatal(err)
	}
	who, err := protocol.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	inbox := protocol.InboxChannel(prefix, who.Client)
	eventually(t, "the owner subscribes", func() bool {
		count, err := rdb.PubSubNumSub(t.Context(), inbox).Result()
		return err == nil && count[inbox] > 0
	})
	return lease
}

func TestALockWhoseClientsHaveAnotherPrefixIsLeftToThatPrefix(t *testing.T) {
	redistest.InTurn(t, func(t *testing.T, s redistest.Target) {
		rdb := s.NewClient(t)
		at := []string{"--redis", s.Addr, "--prefix", s.Prefix}
		inner := s.Prefix + "billing:"
		lease := holds(t, rdb, inner, "no.  1", `web[1]*?\`)
		key := s.Prefix + "billing:no.  1"

		says := `is lock "no.  1" of clients with key prefix "` + inner + `"; give --prefix ` + inner + " and the name 'no.  1'\n"
		got := invoke(t, append([]string{"unlock", "--force", "--yes", "billing:no.  1"}, at...)...)
		if want := says; got.status != statusUsage || got.out != "" || !strings.Contains(got.err, want) {
			t.Errorf("unlock: %+v, want %q", got, want)
		}
		status, out, errs := runResult(t, s.Addr, "--prefix", s.Prefix, "billing:no.  1", "--", "true")
		if want := says; status != statusRunUsage || out != "" || !strings.HasSuffix(errs, want) {
			t.Errorf("run: status %d, stdout %q, stderr %q, want %q", status, out, errs, want)
		}
		t.Setenv("COLUMNS", "") // no line is broken
		got = invoke(t, append([]string{"inspect", "billing:no.  1"}, at...)...)
		if want := "\nhint    \"" + key + "\" " + says; got.status != 0 || !strings.Contains(got.out, want) {
			t.Errorf("inspect: %+v, want %q", got, want)
		}
		got = invoke(t, append([]string{"inspect", "--json", "billing:no.  1"}, at...)...)
		var one jsonInfo
		if err := json.Unmarshal([]byte(got.out), &one); err != nil || got.status != 0 || one.State != stateHeld || got.err != "" ||
			one.Hint != `"`+key+`" `+strings.TrimSpace(says) {
			t.Errorf("inspect --json: %+v, %v", got, err)
		}
		if err := lease.Check(t.Context()); err != nil {
			t.Fatalf("the owner lost its lease: %v", err)
		}

		// The remedy, where the owner is told at once.
		got = invoke(t, "inspect", "no.  1", "--redis", s.Addr, "--prefix", inner)
		if got.status != 0 || strings.Contains(got.out, "hint") {
			t.Errorf("inspect with the right prefix: %+v", got)
		}
		if got := invoke(t, "unlock", "--force", "--yes", "no.  1", "--redis", s.Addr, "--prefix", inner); got.status != 0 {
			t.Errorf("unlock with the right prefix: %+v", got)
		}
		within(t, lease.Context().Done(), "the owner is not told")
	})
}

func TestAPrefixThatClientsDoNotHaveIsRefusedToo(t *testing.T) {
	m := redistest.MiniTCP(t)
	holds(t, redistest.MiniClient(t, m), "", "billing:x", "web")
	got := invoke(t, "unlock", "--force", "--yes", "--prefix", "billing:", "x", "--redis", m.Addr())
	if want := `"billing:x" is lock "billing:x" of clients without a key prefix; give the name billing:x, and no --prefix` + "\n"; got.status != statusUsage || !strings.Contains(got.err, want) {
		t.Errorf("%+v, want %q", got, want)
	}
}

func TestAWaiterBehindAForeignOwnerTellsThePrefix(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	m.Set("billing:x", "mine")
	client, err := leased.New(rdb, leased.WithKeyPrefix("billing:"))
	if err != nil {
		t.Fatal(err)
	}
	waits(t, client, "x")
	eventually(t, "the waiter is found by its channel", func() bool {
		return strings.Contains(invoke(t, "inspect", "billing:x", "--redis", m.Addr()).out, "--prefix billing: and the name x")
	})
	if status, _, errs := runResult(t, m.Addr(), "-w", "0.1", "billing:x", "--", "true"); status != statusRunUsage {
		t.Errorf("run: status %d, stderr %q", status, errs)
	}
	if got := invoke(t, "unlock", "--force", "--yes", "billing:x", "--redis", m.Addr()); got.status != statusUsage {
		t.Errorf("unlock: %+v", got)
	}
}

// What cannot be known is no reason to refuse.
func TestWithoutAChannelToSeeThePrefixIsTakenAsGiven(t *testing.T) {
	m := redistest.MiniTCP(t)
	gone := protocol.NewRequest(protocol.NewClientID("gone"), protocol.Exclusive, time.Minute, false, protocol.Counted, protocol.Origin{})
	m.Set("billing:x", gone.ID)
	if got := invoke(t, "unlock", "--force", "--yes", "billing:x", "--redis", m.Addr()); got.status != 0 || m.Exists("billing:x") {
		t.Errorf("of an owner that is gone: %+v", got)
	}

	in := redistest.Server(t)
	rdb := in.Client()
	holds(t, rdb, "billing:", "x", "web")
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "few", "on", ">pass", "~*", "resetchannels", "&*", "+@all", "-pubsub").Err(); err != nil {
		t.Fatal(err)
	}
	if got := invoke(t, "unlock", "--force", "--yes", "billing:x", "--redis", "redis://few:pass@"+in.Addr); got.status != 0 {
		t.Errorf("by a user that may not ask for channels: %+v", got)
	}
}

func TestOnAQuorumAnotherPrefixIsFoundToo(t *testing.T) {
	var addrs []string
	var rdbs []redis.UniversalClient
	for range 3 {
		m := redistest.MiniTCP(t)
		addrs, rdbs = append(addrs, m.Addr()), append(rdbs, redistest.MiniClient(t, m))
	}
	client, err := leased.NewQuorum(rdbs, leased.WithKeyPrefix("billing:"))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	lease, err := client.Mutex("x").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Unlock()
	at := []string{"--quorum", "--redis", strings.Join(addrs, ",")}
	eventually(t, "the lock is found by its name without the prefix", func() bool {
		return strings.Contains(invoke(t, append([]string{"inspect", "x"}, at...)...).out, "which is held; if you mean that one, give --prefix billing:")
	})
	eventually(t, "the owner is found by its channel", func() bool {
		return strings.Contains(invoke(t, append([]string{"inspect", "billing:x"}, at...)...).out, "--prefix billing: and the name x")
	})
	if got := invoke(t, append([]string{"unlock", "--force", "--yes", "billing:x"}, at...)...); got.status != statusUsage {
		t.Errorf("unlock: %+v", got)
	}
}

// hintOf returns the hint of inspect, without and with --json.
func hintOf(t *testing.T, name string, at ...string) string {
	t.Helper()
	t.Setenv("COLUMNS", "") // no line is broken
	text, object := invoke(t, append([]string{"inspect", name}, at...)...), invoke(t, append([]string{"inspect", "--json", name}, at...)...)
	var one jsonInfo
	if err := json.Unmarshal([]byte(object.out), &one); err != nil || text.status != 0 || object.status != 0 || text.err+object.err != "" {
		t.Errorf("%+v, %+v, %v", text, object, err)
	}
	_, hint, _ := strings.Cut(text.out, "\nhint    ")
	if hint = strings.TrimSuffix(hint, "\n"); hint != one.Hint {
		t.Errorf("inspect says %q, and with --json %q", hint, one.Hint)
	}
	return hint
}

func TestALockThatIsKnownOnlyWithAPrefixIsFoundWithoutIt(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	at := []string{"--redis", m.Addr()}
	saysNothing := `Redis remembers no lock "ledger"; if your service sets a key prefix (WithKeyPrefix), give it by --prefix`
	if got := hintOf(t, "ledger", at...); got != saysNothing {
		t.Errorf("with no clients: %q", got)
	}
	holds(t, rdb, "app:", "stock", "web")
	if got, want := hintOf(t, "ledger", at...), saysNothing+`: clients here have "app:"`; got != want {
		t.Errorf("with clients that do not know the lock: %q, want %q", got, want)
	}
	alone := redistest.MiniTCP(t)
	holds(t, redistest.MiniClient(t, alone), "", "stock", "web")
	if got := hintOf(t, "ledger", "--redis", alone.Addr()); got != "" {
		t.Errorf("with no prefix, as all clients: %q", got)
	}
	holds(t, rdb, "", "stock", "other")
	if got, want := hintOf(t, "ledger", append(at, "--prefix", "api:")...), `Redis remembers no lock "api:ledger"; `+
		`your service may have another key prefix than "api:": clients here have none, "app:"`; got != want {
		t.Errorf("with another prefix: %q, want %q", got, want)
	}
	if got, want := hintOf(t, "stock", append(at, "--prefix", "api:")...), `Redis remembers no lock "api:stock", `+
		`but clients without a key prefix have one of this name, which is held; if you mean that one, give no --prefix`; got != want {
		t.Errorf("with a prefix that clients do not have: %q, want %q", got, want)
	}

	if got := hintOf(t, "ledger", append(at, "--prefix", "app:")...); got != "" {
		t.Errorf("with a prefix that clients have, of a lock that nobody uses: %q", got)
	}
	if got := hintOf(t, "ledger", "--redis", redistest.MiniTCP(t).Addr(), "--prefix", "api:"); got != "" {
		t.Errorf("with a prefix, and nobody there: %q", got)
	}

	if got := hintOf(t, "stock", append(at, "--prefix", "web:")...); !strings.Contains(got, "one of this name") {
		t.Errorf("with a prefix that clients do not have yet: %q", got)
	}
	holds(t, rdb, "web:", "order", "web")
	if got := hintOf(t, "stock", append(at, "--prefix", "web:")...); got != "" {
		t.Errorf("with a prefix that clients have, of a lock that others have, too: %q", got)
	}

	lease := holds(t, rdb, "app:", "ledger", "web")
	for _, c := range []struct {
		state  string
		change func()
	}{
		{"held", func() {}},
		{"free", func() {
			if err := lease.Unlock(); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		c.change()
		want := `Redis remembers no lock "ledger", but clients with key prefix "app:" have one of this name, which is ` + c.state + `; if you mean that one, give --prefix app:`
		if got := hintOf(t, "ledger", at...); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		got := invoke(t, append([]string{"unlock", "--force", "--yes", "ledger"}, at...)...)
		if got.status != 0 || got.out != "\"ledger\" is free.\n" || got.err != "leased: "+want+"\n" {
			t.Errorf("unlock: %+v", got)
		}
		if got := hintOf(t, "ledger", append(at, "--prefix", "app:")...); got != "" {
			t.Errorf("with the right prefix: %q", got)
		}
	}
}

// The rights of locks are enough to be told that the prefix may be missing.
func TestAMissingPrefixIsSuspectedWithoutTheRightToAskForChannels(t *testing.T) {
	in := redistest.Server(t)
	holds(t, in.Client(), "app:", "ledger", "web")
	if err := in.Client().Do(t.Context(), "ACL", "SETUSER", "few", "on", ">pass", "~*", "resetchannels", "&*", "+@all", "-pubsub").Err(); err != nil {
		t.Fatal(err)
	}
	want := `Redis remembers no lock "ledger"; if your service sets a key prefix (WithKeyPrefix), give it by --prefix`
	if got := hintOf(t, "ledger", "--redis", "redis://few:pass@"+in.Addr); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestInspectThatWatchesLooksForPrefixesOnce(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	holds(t, rdb, "app:", "stock", "web")
	var asked atomic.Int32
	m.Server().SetPreHook(func(_ *server.Peer, cmd string, args ...string) bool {
		if cmd == "PUBSUB" && strings.EqualFold(args[0], "channels") && strings.HasPrefix(args[1], "*leased:inbox:") {
			asked.Add(1)
		}
		return false
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs shared
	done := make(chan int)
	// Ended by cancel, waited for below.
	go func() {
		done <- run(ctx, streams{strings.NewReader(""), &out, &errs}, []string{"inspect", "--watch", "--json", "--interval", "50ms", "stock", "--redis", m.Addr()})
	}()
	eventually(t, "three looks", func() bool { return strings.Count(out.String(), "\n") >= 3 })
	for line := range strings.Lines(out.String()) {
		if !strings.Contains(line, "one of this name; if you mean that one, give --prefix app:") {
			t.Errorf("no hint, or one that may not last: %s", line)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("Redis went through its channels %d times", n)
	}
	last, err := m.Get("app:stock:{app:stock}:meta")
	if err != nil {
		t.Fatal(err)
	}
	m.Set("stock:{stock}:meta", last) // as after a use between two looks
	eventually(t, "a trace of the lock", func() bool { return strings.Contains(out.String(), `"token":`) })
	if _, after, _ := strings.Cut(out.String(), `"token":`); strings.Contains(after, "hint") {
		t.Errorf("a hint about a lock that has a trace: %s", after)
	}
	cancel()
	<-done
}
