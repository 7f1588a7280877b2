package leased_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// switchings are ways in which an operator has Redis refuse a client's connections.
var switchings = map[string]struct {
	off, on []any
	text    string
}{
	"the user is switched off":    {[]any{"off"}, []any{"on"}, "WRONGPASS"},
	"the password is another one": {[]any{"resetpass", ">new"}, []any{">pw"}, "WRONGPASS"},
}

// Where the connection itself is refused, no command of a pipeline has an error.

func TestUnlockIsNotNilWhileRedisKeepsTheOwnerOfARefusedConnection(t *testing.T) {
	t.Parallel()
	for what, c := range switchings {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, acl, app := onAppServer(t)
			client := clientOn(t, s, s.connect(t, app), leased.WithTTL(20*time.Second), leased.WithReleaseTimeout(500*time.Millisecond))
			l := lock(t, client.Mutex("x"))
			acl(c.off...)
			must(t, s.rdb.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err())
			err := l.Unlock()
			isAll(t, err, leased.ErrNotReleased)
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("Unlock: %v", err)
			}
			if s.value(t, "x") == "" {
				t.Fatal("it was released: the test has proved nothing")
			}
			acl(c.on...)
			s.becomesClean(t, "x")
		})
	}
}

func TestAWaiterThatGaveUpIsCanceledWhenItsConnectionIsNotRefusedAnyMore(t *testing.T) {
	t.Parallel()
	s, acl, app := onAppServer(t)
	l := lock(t, newClient(t, s).Mutex("x"))
	var out logs
	client := clientOn(t, s, s.connect(t, app), out.option(), leased.WithTTL(time.Hour))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	refused := make(chan error, 1)
	go func() { // ended by cancel, waited for through refused
		_, err := client.Mutex("x").LockContext(ctx)
		refused <- err
	}()
	s.queued(t, "x", 1)
	acl("off")
	must(t, s.rdb.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err())
	cancel()
	isAll(t, closesSoon(t, "LockContext returns", refused), leased.ErrNotAcquired)
	eventually(t, "a cancel is refused", func() bool { return out.count(slog.LevelError, "operator") > 0 })
	s.queued(t, "x", 1)
	acl("on")
	s.queued(t, "x", 0)
	unlock(t, l)
}

func TestARenewalOverARefusedConnectionSaysWhy(t *testing.T) {
	t.Parallel()
	s, acl, app := onAppServer(t)
	var out logs
	client := clientOn(t, s, s.connect(t, app), out.option(), leased.WithTTL(900*time.Millisecond))
	l := lock(t, client.Mutex("x"))
	acl("off")
	must(t, s.rdb.Do(context.Background(), "CLIENT", "KILL", "USER", "app").Err())
	<-l.Context().Done()
	isAll(t, l.Unlock(), leased.ErrLeaseLost)
	if n := out.count(slog.LevelError, "operator"); n != 1 {
		t.Errorf("logged %q", out.messages())
	}
	acl("on")
	s.becomesClean(t, "x")
}

// bare is a hook after which nothing of a pipeline has a value or an error.
type bare struct{ err error }

func (b bare) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (b bare) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (b bare) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { return b.err }
}

func TestACommandWithoutReplyAndWithoutErrorHadNoAnswer(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		c := clientOn(t, s, rdb, leased.WithTTL(30*time.Second))
		l := lock(t, c.Mutex("x"))
		s.hook(rdb, bare{})
		began := time.Now()
		<-l.Context().Done()
		if took := time.Since(began); took != 30*time.Second-302*time.Millisecond {
			t.Errorf("ended after %v", took)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}
