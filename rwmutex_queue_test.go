package leased_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// The order among readers and writers, and what it costs.

// warm loads the scripts and waits until the clients' inboxes are confirmed, so that
// commands can be counted and a vanished waiter is noticed.
func warm(t *testing.T, s place, clients ...*leased.Client) {
	t.Helper()
	for _, c := range clients {
		l := take(t, c.RWMutex("warm").LockContext)
		downgrade(t, l)
		unlock(t, l)
	}
	for _, c := range clients {
		hears(t, s, c) // its inbox is confirmed, and has said so to all its locks
	}
}

// hears returns when c has received all that was published to it before: c keeps another
// lock idle, is notified that it is wanted, and has released it by then. On a quorum, each server
// notifies it once.
func hears(t *testing.T, s place, c *leased.Client) {
	t.Helper()
	if s.members == nil {
		hearsFrom(t, s, c, func() string { return s.value(t, "marker") }, func(inbox, message string) {
			eventually(t, "the inbox is open", func() bool { return slices.Contains(s.inboxes(t), inbox) })
			must(t, s.rdb.Publish(context.Background(), inbox, message).Err())
		})
		return
	}
	for _, one := range s.members.minis {
		hearsFrom(t, s, c, func() string { return s.members.held(s.Prefix + "marker")[one] }, func(inbox, message string) {
			eventually(t, "the inbox is open", func() bool { return one.Publish(inbox, message) > 0 })
		})
	}
}

// hearsFrom is hears for one server. It sends one message: a second one would be answered with a
// cancel, which tests count.
func hearsFrom(t *testing.T, s place, c *leased.Client, owner func() string, publish func(inbox, message string)) {
	t.Helper()
	unlock(t, take(t, c.RWMutex("marker", leased.WithIdleHold(time.Hour)).LockContext))
	eventually(t, "the messages of all servers are heard", func() bool { return leased.Subscribed(c) })
	id := ""
	eventually(t, "the marker is owned there", func() bool {
		s.settle() // it may still have the last one
		id = owner()
		return id != ""
	})
	publish(s.Prefix+"leased:inbox:"+strings.SplitN(id, ":", 6)[5], "leased1:wanted "+id+" "+s.Prefix+"marker")
	eventually(t, "the marker is heard", func() bool { return s.value(t, "marker") == "" })
}

func TestAWaitingWriterStopsLaterReadersInWhateverProcess(t *testing.T) {
	for _, late := range []string{"the reader's process", "the writer's process", "a third process"} {
		t.Run("later reader in "+late, func(t *testing.T) {
			onBoth(t, func(t *testing.T, s place) {
				a, b, c := newClient(t, s), newClient(t, s), newClient(t, s)
				warm(t, s, a, b, c)
				first := take(t, a.RWMutex("x").RLockContext)
				writer := taking(t, b.RWMutex("x").LockContext)
				s.queued(t, "x", 1)
				// It knows that the lock is wanted when a reader that comes now has to wait.
				client := map[string]*leased.Client{"the reader's process": a, "the writer's process": b, "a third process": c}[late]
				if late == "the reader's process" {
					eventually(t, "no reader is let in anymore", func() bool {
						l, err := client.RWMutex("x").TryRLockContext(context.Background())
						if err == nil {
							unlock(t, l)
						}
						return errors.Is(err, leased.ErrLocked)
					})
				}
				second := taking(t, client.RWMutex("x").RLockContext)
				if late == "a third process" {
					s.queued(t, "x", 2)
				}
				if !open(writer) || !open(second) {
					t.Fatal("somebody entered")
				}
				unlock(t, first)
				w := closesSoon(t, "the writer enters", writer)
				if !open(second) {
					t.Error("the later reader entered before the writer, or beside it")
				}
				unlock(t, w)
				unlock(t, closesSoon(t, "the later reader enters", second))
			})
		})
	}
}

func TestAWaitingWriterStopsLaterReadersOfItsProcess(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		rw := newClient(t, s).RWMutex("x")
		first := take(t, rw.RLockContext)
		writer := taking(t, rw.LockContext)
		synctest.Wait()
		second := taking(t, rw.RLockContext)
		_, err := rw.TryRLockContext(context.Background())
		isAll(t, err, leased.ErrLocked)
		time.Sleep(time.Minute)
		if !open(writer) || !open(second) {
			t.Fatal("somebody entered beside the first reader")
		}
		unlock(t, first)
		w := <-writer
		synctest.Wait()
		if !open(second) {
			t.Error("a reader is inside beside the writer")
		}
		unlock(t, w)
		unlock(t, <-second)
	})
}

// It has its place in the queue before those readers have left: no later caller of any
// process enters before it, whichever reader leaves first.
func TestAWriterBehindReadersOfItsOwnProcessWaitsForThoseInsideOnly(t *testing.T) {
	for _, ownFirst := range []bool{true, false} {
		t.Run(fmt.Sprintf("own readers leave first=%v", ownFirst), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				a, b, c := newClient(t, s), newClient(t, s), newClient(t, s)
				warm(t, s, a, b, c)
				first := take(t, a.RWMutex("x").RLockContext)
				second := take(t, b.RWMutex("x").RLockContext)
				writer := taking(t, a.RWMutex("x").LockContext)
				synctest.Wait()
				third := taking(t, c.RWMutex("x").RLockContext)
				again := taking(t, b.RWMutex("x").RLockContext)
				time.Sleep(5 * time.Minute) // its waiting lease is kept
				if !ownFirst {
					first, second = second, first
				}
				unlock(t, first)
				synctest.Wait()
				if !open(writer) || !open(third) || !open(again) {
					t.Fatal("a reader entered before the writer, or the writer beside a reader")
				}
				unlock(t, second)
				w := <-writer
				synctest.Wait()
				if !open(third) || !open(again) {
					t.Error("a reader is inside beside the writer")
				}
				unlock(t, w)
				unlock(t, <-third)
				unlock(t, <-again)
			})
		})
	}
}

func TestReadersRightBehindAWriterAreGrantedByOneCommandAndEnterTogether(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const processes = 5
		a, last := newClient(t, s), newClient(t, s)
		readers, meters := make([]*leased.Client, processes), make([]meter, processes)
		for i := range readers {
			meters[i] = newMeter(t)
			readers[i] = newClient(t, s, leased.WithMeterProvider(meters[i]))
		}
		warm(t, s, append(readers, a, last)...)
		owner := take(t, a.RWMutex("x").LockContext)
		var inside []<-chan *leased.Lease
		for i, c := range readers {
			inside = append(inside, taking(t, c.RWMutex("x").RLockContext))
			s.queued(t, "x", int64(i+1))
			for range 3 { // they share their process's request
				inside = append(inside, taking(t, c.RWMutex("x").RLockContext))
			}
			eventually(t, "all four wait", func() bool { return sum(t, meters[i].collect(t)["leased.waiting"]) == 4 })
		}
		next := taking(t, last.RWMutex("x").LockContext)
		s.queued(t, "x", processes+1)
		hears(t, s, a)
		before, sent := a.Stats(), s.commands(a)
		unlock(t, owner)
		var leases []*leased.Lease
		for _, ch := range inside { // none leaves before all are in
			leases = append(leases, closesSoon(t, "a reader enters", ch))
		}
		after := a.Stats()
		if n := s.commands(a) - sent; n != 1 && n != 2 { // the script, and on one server a PING ahead of it because they wait
			t.Errorf("the release took %d commands", n)
		}
		if n := after.Handed - before.Handed; n != processes {
			t.Errorf("the release made %d processes owner", n)
		}
		for i, c := range readers {
			if st := c.Stats(); st.Direct != 1 {
				t.Errorf("process %d: %d hand-offs by message", i, st.Direct)
			}
		}
		if !open(next) {
			t.Error("the writer behind them is inside")
		}
		for _, l := range leases {
			unlock(t, l)
		}
		unlock(t, closesSoon(t, "the writer enters", next))
	})
}

func TestReadersBehindACanceledWriterEnterAtOnce(t *testing.T) {
	for _, process := range []string{"another process", "the reader's own process"} {
		t.Run("waiting in "+process, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				a, b, c, d := newClient(t, s), newClient(t, s), newClient(t, s), newClient(t, s)
				first := take(t, a.RWMutex("x").RLockContext)
				ctx, cancel := context.WithCancel(context.Background())
				refused := make(chan error, 1)
				writes := map[string]*leased.Client{"another process": b, "the reader's own process": a}[process].RWMutex("x")
				go func() { // ended by cancel, waited for through refused
					_, err := writes.LockContext(ctx)
					refused <- err
				}()
				synctest.Wait()
				in := []<-chan *leased.Lease{
					taking(t, c.RWMutex("x").RLockContext),
					taking(t, c.RWMutex("x").RLockContext),
					taking(t, d.RWMutex("x").RLockContext),
				}
				if process == "the reader's own process" {
					in = append(in, taking(t, a.RWMutex("x").RLockContext))
				}
				synctest.Wait()
				began := time.Now()
				cancel()
				for _, ch := range in {
					defer unlock(t, <-ch)
				}
				if waited := time.Since(began); waited != 0 {
					t.Errorf("they entered %v after the writer gave up", waited)
				}
				isAll(t, <-refused, context.Canceled)
				unlock(t, first)
			})
		})
	}
}

// The dead writer's connections are gone, so a message to it has no receiver; but none is
// published as long as readers hold the lock.
func TestADeadWaitingWriterBlocksReadersForItsOwnWaitingLeaseAtMost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl, look = 20 * time.Second, 3 * time.Second
		a, c := newClient(t, s, leased.WithTTL(time.Minute)), newClient(t, s, leased.WithTTL(time.Minute))
		b, wire := onLine(t, s, leased.WithTTL(ttl))
		warm(t, s, a, b, c)
		first := take(t, a.RWMutex("x").RLockContext)
		giveUp := mayGiveUp(t, b.RWMutex("x").LockContext)
		synctest.Wait()
		time.Sleep(time.Second)
		wire.cut()
		died := time.Now()
		reader := taking(t, c.RWMutex("x").RLockContext)
		synctest.Wait()
		if !open(reader) {
			t.Fatal("the writer did not stop the reader: the test proves nothing")
		}
		l := <-reader
		if waited := time.Since(died); waited > ttl+look {
			t.Errorf("the reader waited %v for a dead writer with a waiting lease of %v", waited, ttl)
		}
		unlock(t, l)
		unlock(t, first)
		giveUp()
		wire.mend()
	})
}

func TestADeadWaitingWriterIsPassedOverAtOnceWhenTheLockComesToIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		a, c, d := newClient(t, s), newClient(t, s), newClient(t, s)
		b, wire := onLine(t, s)
		warm(t, s, a, b, c, d)
		first := take(t, a.RWMutex("x").RLockContext)
		giveUp := mayGiveUp(t, b.RWMutex("x").LockContext)
		synctest.Wait()
		readers := []<-chan *leased.Lease{taking(t, c.RWMutex("x").RLockContext), taking(t, d.RWMutex("x").RLockContext)}
		synctest.Wait()
		wire.cut()
		synctest.Wait()
		began := time.Now()
		unlock(t, first)
		for _, ch := range readers {
			defer unlock(t, <-ch)
		}
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the readers entered after %v", waited)
		}
		if n := a.Stats().Handed; n != 2 {
			t.Errorf("%d were made owner", n)
		}
		giveUp()
		wire.mend()
	})
}
