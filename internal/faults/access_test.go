//go:build unix

package faults

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

// revocations are ways to take a user's access away. Unlike a command that is refused, here
// the connection itself is refused, before any command is sent.
var revocations = []struct {
	name       string
	away, back []any // arguments of ACL SETUSER app
}{
	{"switched off", []any{"off"}, []any{"on"}},
	{"password changed", []any{"resetpass", ">other"}, []any{"resetpass", ">secret"}},
}

// accessed is a server, and a client whose user's access can be taken away.
type accessed struct {
	t     *testing.T
	admin *redis.Client
	c     *leased.Client
	log   *notes
}

func newAccessed(t *testing.T, opts ...leased.Option) *accessed {
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	a := &accessed{t: t, admin: s.Client(), log: &notes{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(a.log)
		}
	})
	a.set("on", ">secret", "~*", "&*", "+@all")
	rdb := s.Client(func(o *redis.Options) { o.Username, o.Password = "app", "secret" })
	a.c = newClient(t, rdb, "", append(opts, leased.WithLogger(slog.New(slog.NewTextHandler(a.log, nil))))...)
	return a
}

func (a *accessed) set(rules ...any) {
	a.t.Helper()
	if err := a.admin.Do(context.Background(), append([]any{"ACL", "SETUSER", "app"}, rules...)...).Err(); err != nil {
		a.t.Fatal(err)
	}
}

// revoke takes access away and closes the user's existing connections.
func (a *accessed) revoke(rules ...any) {
	a.t.Helper()
	a.set(rules...)
	if err := a.admin.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err(); err != nil {
		a.t.Fatal(err)
	}
}

func TestUnlockIsNotConfirmedByARedisThatRefusesTheConnection(t *testing.T) {
	for _, r := range revocations {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			// The TTL is so long that the lock cannot expire during the test.
			a := newAccessed(t, leased.WithTTL(5*time.Minute), leased.WithReleaseTimeout(200*time.Millisecond))
			look := newClient(t, a.admin, "")
			l := mustLock(t, a.c.Mutex("x"))
			a.revoke(r.away...)
			if err := l.Unlock(); !errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("Unlock returned %v", err)
			}
			info, err := look.Inspect(t.Context(), "x")
			if err != nil || len(info.Owners) != 1 {
				t.Fatalf("Redis keeps %+v, %v", info, err)
			}
			a.set(r.back...)
			nothingLeft(t, look, "x") // released in the background
		})
	}
}

func TestAWaitGivenUpWhileTheConnectionIsRefusedLeavesTheQueueAfterwards(t *testing.T) {
	for _, r := range revocations {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			a := newAccessed(t, leased.WithTTL(5*time.Minute))
			holder := newClient(t, a.admin, "")
			l := mustLock(t, holder.Mutex("x"))
			ctx, cancel := context.WithCancel(t.Context())
			got := wait(ctx, a.c.Mutex("x"))
			queued(t, holder, "x", 1)
			a.revoke(r.away...)
			cancel()
			if o := <-got; !errors.Is(o.err, context.Canceled) {
				t.Errorf("LockContext returned %v", o.err)
			}
			// The cancel that follows is refused, which shows in the log.
			eventually(t, "the refusal in the log", func() bool { return strings.Contains(a.log.String(), "WRONGPASS") })
			a.set(r.back...)
			queued(t, holder, "x", 0)
			mustUnlock(t, l)
		})
	}
}

func TestRenewalsWhoseConnectionIsRefusedSayWhyAndGoOn(t *testing.T) {
	t.Parallel()
	for _, r := range revocations {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			a := newAccessed(t, leased.WithTTL(6*time.Second))
			l := mustLock(t, a.c.Mutex("x"))
			justRenewed(t, a.c, 1)
			a.revoke(r.away...)
			eventually(t, "a renewal's refusal in the log", func() bool { return strings.Contains(a.log.String(), "WRONGPASS") })
			a.set(r.back...)
			justRenewed(t, a.c, 1)
			if l.Context().Err() != nil {
				t.Errorf("the lease ended: %v", context.Cause(l.Context()))
			}
			mustUnlock(t, l)
			if text := a.log.String(); strings.Contains(text, "unexpected type") {
				t.Errorf("the log: %s", text)
			}
		})
	}
}
