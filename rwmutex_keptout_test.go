package leased_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// A writer of another process keeps further readers of a process out for as long as it waits, however long
// the readers inside stay.

func TestAWriterThatGaveUpKeepsNoReaderOut(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		warm(t, s, c, other)
		rw := c.RWMutex("x")
		first := take(t, rw.RLockContext)
		giveUp := mayGiveUp(t, other.RWMutex("x").LockContext)
		s.queued(t, "x", 1)
		eventually(t, "the process knows that it is wanted", func() bool {
			l, err := rw.TryRLockContext(context.Background())
			if err == nil {
				unlock(t, l)
			}
			return err != nil
		})
		second := reading(t, rw)
		giveUp()
		unlock(t, closesSoon(t, "the second reader enters", second))
		unlock(t, take(t, rw.TryRLockContext))
		unlock(t, first)
	})
}

func TestVirtualAWriterThatGaveUpCostsTheNextReaderOneQuestion(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, other := newClient(t, s), newClient(t, s)
		warm(t, s, c, other)
		rw := c.RWMutex("x")
		first := take(t, rw.RLockContext)
		for _, waits := range []bool{true, false} {
			giveUp := mayGiveUp(t, other.RWMutex("x").LockContext)
			synctest.Wait()
			var second <-chan *leased.Lease
			if waits {
				second = reading(t, rw)
				time.Sleep(time.Second)
				if !open(second) {
					t.Fatal("a reader enters before a writer that waits")
				}
			}
			before := s.commands(c)
			began := time.Now()
			giveUp()
			if waits {
				unlock(t, <-second)
			} else {
				synctest.Wait()
				unlock(t, take(t, rw.TryRLockContext))
			}
			if d := time.Since(began); d > 50*time.Millisecond {
				t.Errorf("waits %v: it enters after %v", waits, d)
			}
			unlock(t, take(t, rw.RLockContext))
			if n := s.commands(c) - before; n > 2 {
				t.Errorf("waits %v: readers have sent %d commands", waits, n)
			}
		}
		unlock(t, first)
	})
}

// Nobody says that it gave up. Its waiting lease ends, and the readers ask.
func TestVirtualAWriterThatVanishedKeepsReadersOutForItsTTLAndAPause(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 10 * time.Second
		c := newClient(t, s)
		other, wire := onLine(t, s, leased.WithTTL(ttl))
		warm(t, s, c, other)
		rw := c.RWMutex("x")
		first := take(t, rw.RLockContext)
		writer := locking(t, other.Mutex("x"))
		synctest.Wait()
		second := reading(t, rw)
		wire.cut()
		began := time.Now()
		l := <-second
		if d := time.Since(began); d <= ttl/2 || d > ttl+4*time.Second+100*time.Millisecond {
			t.Errorf("the second reader entered after %v", d)
		}
		wire.mend()
		unlock(t, l)
		unlock(t, first)
		unlock(t, <-writer)
	})
}

// A question for each reader and second would cost more than the lock.
func TestVirtualReadersHardlyAskWhileAWriterWaits(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, other := newClient(t, s, leased.WithTTL(time.Hour)), newClient(t, s)
		warm(t, s, c, other)
		rw := c.RWMutex("x")
		first := take(t, rw.RLockContext)
		writer := locking(t, other.Mutex("x"))
		synctest.Wait()
		before := s.commands(c)
		var readers []<-chan *leased.Lease
		for range 10 {
			readers = append(readers, reading(t, rw))
		}
		time.Sleep(5 * time.Minute)
		if n := s.commands(c) - before; n > 3 {
			t.Errorf("10 readers that wait for 5 minutes have sent %d commands", n)
		}
		unlock(t, first)
		l := <-writer
		for _, r := range readers {
			if !open(r) {
				t.Error("a reader entered before the writer")
			}
		}
		unlock(t, l)
		for _, r := range readers {
			unlock(t, <-r)
		}
	})
}
