package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/examples/internal/testclient"
)

// active is a partner that keeps for whom each code is active, and under which token.
type active struct {
	during func(code, user string, token uint64) // called while a code is being activated; may be nil

	mu    sync.Mutex
	users map[string][]string
}

func (p *active) Activate(_ context.Context, code, user string, token uint64) error {
	p.mu.Lock()
	if p.users == nil {
		p.users = map[string][]string{}
	}
	p.users[code] = append(p.users[code], fmt.Sprint(token, " ", user))
	p.mu.Unlock()
	if p.during != nil {
		p.during(code, user, token)
	}
	return nil
}

func (p *active) Deactivate(_ context.Context, code, user string, token uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users[code] = slices.DeleteFunc(p.users[code], func(it string) bool { return it == fmt.Sprint(token, " ", user) })
	return nil
}

// soldAsWritten fails the test unless each code that was given is active for its user, once and
// for no other, and no other code is active.
func soldAsWritten(t *testing.T, s *shop, p *active, want int) {
	t.Helper()
	owners, err := s.rdb.HGetAll(t.Context(), given).Result()
	if err != nil || len(owners) != want {
		t.Errorf("%d coupons were given, want %d (%v)", len(owners), want, err)
	}
	for code, users := range p.users {
		if owner := owners[code]; owner == "" && len(users) > 0 || owner != "" && (len(users) != 1 || users[0] != owner) {
			t.Errorf("%s was given to %q and is active for %q", code, owner, users)
		}
	}
}

func TestEachCouponGoesToOneUserOfThreeServers(t *testing.T) {
	_, rdb := testclient.Redis(t)
	p := &active{}
	var shops []*shop
	for range 3 {
		shops = append(shops, &shop{locks: testclient.Process(t, rdb), rdb: rdb, partner: p, pause: shortPause})
	}
	if err := shops[0].open(t.Context(), []string{"A", "B", "C", "D", "E", "F", "G", "H"}); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 12 {
		all.Go(func() {
			for {
				switch _, err := shops[i%3].grab(t.Context(), fmt.Sprint("user-", i)); {
				case err == nil, errors.Is(err, errNoneLeft):
					return
				case !errors.Is(err, leased.ErrLocked):
					t.Errorf("user %d: %v", i, err)
					return
				}
			}
		})
	}
	all.Wait()
	soldAsWritten(t, shops[0], p, 8)
}

func TestAGrabWhoseLeaseIsLostIsRolledBack(t *testing.T) {
	_, rdb := testclient.Redis(t)
	slow, quick := testclient.Process(t, rdb), testclient.Process(t, rdb)
	p := &active{}
	second := &shop{locks: quick, rdb: rdb, partner: p, pause: shortPause}
	first := &shop{locks: slow, rdb: rdb, partner: p, pause: shortPause}
	p.during = func(_, user string, _ uint64) {
		if user != "first" {
			return
		}
		// While the first user's code is being activated, its lock is taken away, and
		// another user gets the same code.
		if _, err := quick.ForceUnlock(context.Background(), "coupon"); err != nil {
			t.Error(err)
		}
		if code, err := second.grab(context.Background(), "second"); err != nil || code != "A" {
			t.Errorf("the second user got %q, %v", code, err)
		}
	}
	if err := first.open(t.Context(), []string{"A"}); err != nil {
		t.Fatal(err)
	}
	code, err := first.grab(t.Context(), "first")
	if code != "" || !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("the first user got %q, %v", code, err)
	}
	soldAsWritten(t, first, p, 1)
	if owner := rdb.HGet(t.Context(), given, "A").Val(); !strings.HasSuffix(owner, " second") {
		t.Errorf("the coupon is %q's", owner)
	}
}

// A user's request is slow and loses its lease, and the same request comes again. What the first one
// undoes must not be the second one's, whether that has given the coupon by then or not.
func TestARollBackLeavesALaterGrabOfTheSameUserAlone(t *testing.T) {
	for _, givenFirst := range []bool{false, true} {
		_, rdb := testclient.Redis(t)
		slow, quick := testclient.Process(t, rdb), testclient.Process(t, rdb)
		p := &active{}
		first := &shop{locks: slow, rdb: rdb, partner: p, pause: shortPause}
		second := &shop{locks: quick, rdb: rdb, partner: p, pause: shortPause}
		var once sync.Once
		isActive, rolledBack, again := make(chan struct{}), make(chan struct{}), make(chan string, 1)
		p.during = func(string, string, uint64) {
			mine := false
			once.Do(func() { mine = true })
			if !mine { // the second one
				close(isActive)
				if !givenFirst {
					<-rolledBack
				}
				return
			}
			if _, err := quick.ForceUnlock(context.Background(), "coupon"); err != nil {
				t.Error(err)
			}
			go func() {
				code, err := second.grab(context.Background(), "user")
				again <- fmt.Sprint(code, err)
			}()
			<-isActive
			if givenFirst {
				got := <-again
				again <- got
			}
		}
		if err := first.open(t.Context(), []string{"A"}); err != nil {
			t.Fatal(err)
		}
		if code, err := first.grab(t.Context(), "user"); code != "" || !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("the slow request got %q, %v", code, err)
		}
		close(rolledBack)
		if got := <-again; got != "A<nil>" {
			t.Errorf("the second request got %s", got)
		}
		soldAsWritten(t, first, p, 1)
	}
}

func TestABusyShopIsTriedFiveTimes(t *testing.T) {
	_, rdb := testclient.Redis(t)
	other := testclient.Process(t, rdb)
	lease, err := other.Mutex("coupon").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := lease.Unlock(); err != nil {
			t.Error(err)
		}
	}()
	pauses := 0
	s := &shop{locks: testclient.Process(t, rdb), rdb: rdb, partner: &active{}, pause: func() time.Duration {
		pauses++
		return time.Millisecond
	}}
	if _, err := s.grab(t.Context(), "user"); !errors.Is(err, leased.ErrLocked) || pauses != tries-1 {
		t.Errorf("after %d pauses: %v", pauses, err)
	}
}

func TestAGiveThatArrivesAfterItsRollBackIsRefused(t *testing.T) {
	_, rdb := testclient.Redis(t)
	p := &active{}
	s := &shop{rdb: rdb, partner: p}
	if err := s.open(t.Context(), []string{"A"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.next(t.Context(), 7); err != nil {
		t.Fatal(err)
	}
	_ = p.Activate(t.Context(), "A", "user", 7)
	if kept, err := s.rollBack(t.Context(), 7, "A", "user"); kept || err != nil {
		t.Fatal(kept, err)
	}
	if err := s.give(t.Context(), 7, "A", "user"); !errors.Is(err, errStale) {
		t.Errorf("it was accepted: %v", err)
	}
	soldAsWritten(t, s, p, 0)
}

// An earlier lease may be rolled back after a later one.
func TestARollBackDoesNotUndoAnother(t *testing.T) {
	_, rdb := testclient.Redis(t)
	p := &active{}
	s := &shop{rdb: rdb, partner: p}
	if err := s.open(t.Context(), []string{"A"}); err != nil {
		t.Fatal(err)
	}
	for token := uint64(7); token <= 8; token++ {
		if _, err := s.next(t.Context(), token); err != nil {
			t.Fatal(err)
		}
		_ = p.Activate(t.Context(), "A", "user", token)
	}
	for token := uint64(8); token >= 7; token-- {
		if kept, err := s.rollBack(t.Context(), token, "A", "user"); kept || err != nil {
			t.Fatal(kept, err)
		}
	}
	if err := s.give(t.Context(), 8, "A", "user"); !errors.Is(err, errStale) {
		t.Errorf("it was accepted: %v", err)
	}
	soldAsWritten(t, s, p, 0)
}

// losesGives is a hook that loses the replies to scripts that write a hash.
type losesGives struct{ n int }

func (*losesGives) DialHook(next redis.DialHook) redis.DialHook { return next }
func (*losesGives) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (l *losesGives) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if args := cmd.Args(); err == nil && l.n > 0 && len(args) > 1 && args[1] == giveScript.Hash() {
			l.n--
			cmd.SetErr(io.EOF)
			return io.EOF
		}
		return err
	}
}

func TestACouponWhoseReplyIsLostIsTheUsersAllTheSame(t *testing.T) {
	_, rdb := testclient.Redis(t)
	p := &active{}
	s := &shop{locks: testclient.Process(t, rdb), rdb: rdb, partner: p, pause: shortPause}
	if err := s.open(t.Context(), []string{"A", "B"}); err != nil {
		t.Fatal(err)
	}
	if code, err := s.grab(t.Context(), "first"); code != "A" || err != nil { // and the server knows the scripts
		t.Fatal(code, err)
	}
	rdb.AddHook(&losesGives{1})
	if code, err := s.grab(t.Context(), "user"); code != "B" || err != nil {
		t.Errorf("the user got %q, %v", code, err)
	}
	soldAsWritten(t, s, p, 2)
}

func TestTheProgramRuns(t *testing.T) {
	server, rdb := testclient.Redis(t)
	if err := run(t.Context(), server.Addr); err != nil {
		t.Error(err)
	}
	if n := rdb.HLen(t.Context(), given).Val(); n == 0 {
		t.Error("it gave out no coupon")
	}
}
