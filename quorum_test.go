package leased_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// onQuorum runs f on five embedded servers in virtual time.
func onQuorum(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		f(t, quorumPlace(t, true))
	})
}

func TestAQuorumLocksAndHandsOver(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		first := lock(t, a.Mutex("x"))
		if err := first.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
			t.Fatal("two owners")
		}
		waiter := locking(t, b.Mutex("x"))
		time.Sleep(10 * time.Second)
		if !open(waiter) {
			t.Fatal("two owners")
		}
		synctest.Wait() // a re-check may be under way
		before := b.Stats().Commands
		unlock(t, first)
		second := <-waiter
		if second.Token() <= first.Token() {
			t.Errorf("tokens %d, %d", first.Token(), second.Token())
		}
		if n := b.Stats().Commands - before; n != 0 || b.Stats().Direct != 1 {
			t.Errorf("a hand-off cost its receiver %d commands: %+v", n, b.Stats())
		}
		unlock(t, second)
		synctest.Wait()
		if !s.clean(t, "x") {
			t.Error("keys are left")
		}
	})
}

func TestAQuorumsLeaseIsLostWithinARenewalPeriodOfItsKeys(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s, leased.WithTTL(30*time.Second)).Mutex("x"))
		time.Sleep(25 * time.Second)
		s.rdb.Del(context.Background(), "x")
		began := time.Now()
		closesSoon(t, "the loss is noticed", l.Context().Done())
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("noticed after %v", took)
		}
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestServersOfAQuorumThatLoseTheirDataWhileALeaseIsHeldGiveItToNobodyElse(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		l := lock(t, a.Mutex("x"))
		for range 3 { // each time a majority, and never all
			for _, mini := range s.members.minis[:3] {
				mini.FlushAll()
			}
			if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
				t.Fatal("two owners")
			}
			time.Sleep(time.Minute)
			if err := l.Context().Err(); err != nil {
				t.Fatalf("lost, though nobody else can have owned it: %v", context.Cause(l.Context()))
			}
			if _, err := b.Mutex("x").TryLockContext(t.Context()); err == nil {
				t.Fatal("two owners")
			}
		}
		unlock(t, l)
	})
}

// What a server that did not answer carries out late is given back when it sends a message
// about it, although it would be asked only later whether it answers.
func TestAServerOfAQuorumThatSendsAMessageIsAskedAtOnceWhetherItAnswers(t *testing.T) {
	onQuorum(t, func(t *testing.T, s place) {
		var way hang
		a, b := clientOn(t, s, s.connect(t, way.change)), newClient(t, s)
		for _, c := range []*leased.Client{a, b} { // their inboxes are confirmed
			unlock(t, lock(t, c.Mutex("another")))
		}
		time.Sleep(time.Second)
		way.start()
		late := locking(t, a.Mutex("x"))
		time.Sleep(3*time.Minute + 11*time.Second)
		way.end(t)
		time.Sleep(time.Millisecond)
		if s.value(t, "x") == "" {
			t.Fatal("nothing was carried out late")
		}
		began := time.Now()
		l := lock(t, b.Mutex("x"))
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("it took %v to enter a lock that its owner does not know of", took)
		}
		unlock(t, l)
		unlock(t, <-late)
	})
}
