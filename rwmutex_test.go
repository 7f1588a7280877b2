package leased_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// take locks by any of the calls that return a lease.
func take(t *testing.T, call func(context.Context) (*leased.Lease, error)) *leased.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	l, err := call(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// mayGiveUp locks in a goroutine; the function returned has it give up, and waits for that.
func mayGiveUp(t *testing.T, call func(context.Context) (*leased.Lease, error)) (giveUp func()) {
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() { // ended by giveUp, which waits for it
		_, err := call(ctx)
		gone <- err
	}()
	return func() {
		t.Helper()
		cancel()
		isAll(t, <-gone, context.Canceled)
	}
}

// taking locks in a goroutine, which sends the lease.
func taking(t *testing.T, call func(context.Context) (*leased.Lease, error)) <-chan *leased.Lease {
	ch := make(chan *leased.Lease, 1)
	// Ended by its lease, which every test receives.
	go func() {
		l, err := call(context.Background())
		if err != nil {
			t.Error(err)
		}
		ch <- l
	}()
	return ch
}

func TestAnRWMutexHasTheMethodsOfSyncRWMutex(t *testing.T) {
	theirs, ours := reflect.TypeFor[*sync.RWMutex](), reflect.TypeFor[*leased.RWMutex]()
	want, got := reflect.ValueOf(&sync.RWMutex{}), reflect.ValueOf(&leased.RWMutex{})
	if theirs.NumMethod() < 7 {
		t.Fatalf("sync.RWMutex has %d methods", theirs.NumMethod())
	}
	for i := range theirs.NumMethod() {
		name := theirs.Method(i).Name
		if _, ok := ours.MethodByName(name); !ok {
			t.Errorf("no %s", name)
			continue
		}
		if w, g := want.MethodByName(name).Type(), got.MethodByName(name).Type(); w != g {
			t.Errorf("%s is a %v, not a %v", name, g, w)
		}
	}
}

// Which callers may be inside together, whether they are of one client or of two.
func TestReadersEnterBesideReadersAndNobodyElseBesideAnybody(t *testing.T) {
	for what, c := range map[string]struct{ owner, asker string }{
		"a reader beside a reader": {"read", "read"},
		"a writer beside a reader": {"read", "write"},
		"a reader beside a writer": {"write", "read"},
		"a writer beside a writer": {"write", "write"},
	} {
		may := c.owner == "read" && c.asker == "read"
		t.Run(what, func(t *testing.T) {
			onBoth(t, func(t *testing.T, s place) {
				mine, another := newClient(t, s), newClient(t, s)
				for where, client := range map[string]*leased.Client{"one client": mine, "two clients": another} {
					own, ask := mine.RWMutex("x"), client.RWMutex("x")
					unown, try, undo, call := own.Unlock, ask.TryLock, ask.Unlock, ask.TryLockContext
					if c.asker == "read" {
						try, undo, call = ask.TryRLock, ask.RUnlock, ask.TryRLockContext
					}
					if c.owner == "read" {
						own.RLock()
						unown = own.RUnlock
					} else {
						own.Lock()
					}
					if got := try(); got != may {
						t.Errorf("%s: tried: %v, want %v", where, got, may)
					}
					if may {
						undo()
					}
					l, err := call(context.Background())
					switch {
					case may && err != nil, !may && !errors.Is(err, leased.ErrLocked):
						t.Errorf("%s: tried with a context: %v", where, err)
					case may:
						unlock(t, l)
					}
					unown()
					if !try() {
						t.Fatalf("%s: not free afterwards", where)
					}
					undo()
				}
				s.becomesClean(t, "x")
			})
		})
	}
}

func TestUnlockingWhatIsNotLockedThatWayPanics(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rw := c.RWMutex("x")
		demand := func(state string, calls ...func()) {
			t.Helper()
			for i, call := range calls {
				if err, ok := panics(call).(error); !ok || !errors.Is(err, leased.ErrNotLocked) || !strings.Contains(err.Error(), "of unlocked mutex") {
					t.Errorf("%s, call %d: panics with %v", state, i, err)
				}
			}
		}
		demand("free", rw.Unlock, rw.RUnlock, rw.RLocker().Unlock, c.Mutex("x").Unlock)
		rw.RLock()
		demand("read", rw.Unlock, c.Mutex("x").Unlock)
		rw.RLock()
		rw.RUnlock() //nolint:staticcheck // how often it is unlocked is what is tested
		rw.RUnlock()
		demand("read twice, unlocked twice", rw.RUnlock, rw.Unlock)
		rw.Lock()
		demand("written", rw.RUnlock, rw.RLocker().Unlock)
		rw.Unlock()
		demand("written, unlocked", rw.Unlock)

		l := take(t, newClient(t, s).RWMutex("x").RLockContext)
		demand("read in another client", rw.RUnlock, rw.Unlock)
		unlock(t, l)
	})
}

func TestRLockerLocksForReading(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		a, b := newClient(t, s).RWMutex("x"), newClient(t, s).RWMutex("x")
		l := a.RLocker()
		l.Lock()
		l.Lock()
		if !b.TryRLock() {
			t.Error("it excludes readers")
		} else {
			b.RUnlock()
		}
		l.Unlock()
		if b.TryLock() {
			t.Error("one Unlock ended two locks")
		}
		a.RUnlock()
		if !b.TryLock() {
			t.Fatal("not free")
		}
		b.Unlock()
	})
}

func TestARefusedReaderIsToldWhy(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		owner := take(t, newClient(t, s).RWMutex("x").LockContext)
		rw := newClient(t, s).RWMutex("x")
		ctx, cancel := context.WithCancel(context.Background())
		refused := make(chan error, 1)
		go func() { // ended by cancel, waited for through refused
			_, err := rw.RLockContext(ctx)
			refused <- err
		}()
		s.queued(t, "x", 1)
		cancel()
		isAll(t, closesSoon(t, "RLockContext returns", refused), leased.ErrNotAcquired, context.Canceled)
		_, err := rw.TryRLockContext(context.Background())
		isAll(t, err, leased.ErrLocked, leased.ErrNotAcquired)
		err = rw.RDo(ctx, func(context.Context) error { t.Error("ran with an ended context"); return nil })
		isAll(t, err, leased.ErrNotAcquired, context.Canceled)
		s.queued(t, "x", 0)
		unlock(t, owner)
		s.becomesClean(t, "x")

		if _, err := newClient(t, s).RWMutex("").RLockContext(context.Background()); !errors.Is(err, leased.ErrInvalidName) {
			t.Errorf("a bad name: %v", err)
		}
	})
}

func TestRDoRunsBesideOtherReadersAndDoAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		a, b := newClient(t, s).RWMutex("x"), newClient(t, s).RWMutex("x")
		oops := errors.New("oops")
		var inner context.Context
		err := a.RDo(context.Background(), func(ctx context.Context) error {
			inner = ctx
			return b.RDo(ctx, func(ctx context.Context) error {
				if b.TryLock() {
					t.Error("a writer got in beside readers")
				}
				return errors.Join(ctx.Err(), oops)
			})
		})
		if !errors.Is(err, oops) || inner.Err() == nil {
			t.Errorf("%v; its context goes on: %v", err, inner.Err() == nil)
		}
		err = a.Do(context.Background(), func(ctx context.Context) error {
			if b.TryRLock() || a.TryRLock() {
				t.Error("a reader got in beside a writer")
			}
			return ctx.Err()
		})
		if err != nil {
			t.Error(err)
		}
		if with := panics(func() { _ = a.RDo(context.Background(), func(context.Context) error { panic(oops) }) }); with != oops {
			t.Errorf("panicked with %v", with)
		}
		s.becomesClean(t, "x")
	})
}

func TestAMutexAndAnRWMutexOfOneNameAreOneLock(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		one, other := newClient(t, s), newClient(t, s)
		for where, c := range map[string]*leased.Client{"one client": one, "two clients": other} {
			one.Mutex("x").Lock()
			if rw := c.RWMutex("x"); rw.TryRLock() || rw.TryLock() {
				t.Errorf("%s: entered the RWMutex beside the owner of the Mutex", where)
			}
			one.RWMutex("x").Unlock() // any handle of the name
			one.RWMutex("x").RLock()
			if c.Mutex("x").TryLock() {
				t.Errorf("%s: entered the Mutex beside a reader", where)
			}
			one.RWMutex("x").RUnlock()
			one.RWMutex("x").Lock()
			if c.Mutex("x").TryLock() {
				t.Errorf("%s: entered the Mutex beside the writer", where)
			}
			one.Mutex("x").Unlock()
			c.Mutex("x").Lock()
			c.Mutex("x").Unlock() //nolint:staticcheck // that it comes through is what is tested
		}
		s.becomesClean(t, "x")
	})
}

// hall notices when a writer is not alone. The plain counter is there for the
// race detector and for lost updates.
type hall struct {
	readers, writers atomic.Int32
	crowded          atomic.Bool
	writes           int
	reads            atomic.Int64
}

func (h *hall) read(f func()) {
	h.readers.Add(1)
	if h.writers.Load() != 0 {
		h.crowded.Store(true)
	}
	before := h.writes
	f()
	if h.writers.Load() != 0 || h.writes != before {
		h.crowded.Store(true)
	}
	h.reads.Add(1)
	h.readers.Add(-1)
}

func (h *hall) write(f func()) {
	if h.writers.Add(1) != 1 || h.readers.Load() != 0 {
		h.crowded.Store(true)
	}
	h.writes++
	f()
	if h.readers.Load() != 0 {
		h.crowded.Store(true)
	}
	h.writers.Add(-1)
}

func TestWritersAreAloneAmongClientsAndGoroutinesThatReadWriteAndGiveUp(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		const clients, callers, turns = 3, 6, 40
		var h hall
		var all sync.WaitGroup
		for range clients {
			rw := newClient(t, s, leased.WithLocalHandoffs(4, time.Millisecond)).RWMutex("x")
			for i := range callers {
				all.Go(func() {
					for range turns {
						call, visit := rw.RLockContext, h.read
						if i == 0 {
							call, visit = rw.LockContext, h.write
						}
						ctx, cancel := context.Background(), context.CancelFunc(func() {})
						if rand.IntN(4) == 0 {
							ctx, cancel = context.WithTimeout(ctx, rand.N(2*time.Millisecond))
						}
						l, err := call(ctx)
						if err == nil {
							visit(func() { time.Sleep(rand.N(100 * time.Microsecond)) }) // an invitation to others
							err = l.Unlock()
						} else if errors.Is(err, context.DeadlineExceeded) {
							err = nil
						}
						cancel()
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		all.Wait()
		if h.crowded.Load() || h.writes == 0 || h.reads.Load() == 0 {
			t.Errorf("%d writes, %d reads, a writer was not alone: %v", h.writes, h.reads.Load(), h.crowded.Load())
		}
		s.becomesClean(t, "x")
	})
}

func TestRUnlockSparesALeaseThatIsJustBeingHandedOver(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		rw := c.RWMutex("x")
		turns := 300
		if testing.Short() {
			turns = 100
		}
		for range turns {
			w := take(t, rw.LockContext)
			r := taking(t, rw.RLockContext)
			synctest.Wait()
			var plain sync.WaitGroup
			plain.Go(func() {
				rw.RLock()
				rw.RUnlock() //nolint:staticcheck // that it comes in or does not is the point
			})
			synctest.Wait()
			unlock(t, w)
			l := <-r
			plain.Wait()
			if err := l.Context().Err(); err != nil {
				t.Fatalf("RUnlock ended the lease of RLockContext: %v", err)
			}
			unlock(t, l)
		}
	})
}

// As with a sync.RWMutex: readers do not keep each other out, and their tries come to the same request.
func TestReadersOfAProcessThatTryAtOnceAllEnter(t *testing.T) {
	for _, first := range []string{"a try", "a call that waits"} {
		t.Run(first, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
				s.hook(rdb, &far{}) // so that all have come before there is an answer
				c := clientOn(t, s, rdb)
				warm(t, s, c)
				rw := c.RWMutex("x")
				leases := make(chan *leased.Lease, 5)
				read := func(f func(context.Context) (*leased.Lease, error)) {
					l, err := f(context.Background())
					if err != nil {
						t.Error(err)
					}
					leases <- l
				}
				calls := cap(leases)
				if first != "a try" {
					go read(rw.RLockContext)
					calls--
				}
				for range calls {
					go read(rw.TryRLockContext)
				}
				for range cap(leases) {
					unlock(t, <-leases)
				}
			})
		})
	}
}

func TestReadersOfAProcessThatTryAtOnceAreAllRefusedBesideAWriter(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		c := newClient(t, s)
		warm(t, s, c)
		rw := c.RWMutex("x")
		ended := make(chan error, 9)
		reader := reading(t, rw)
		for range 4 {
			go func() {
				_, err := rw.TryRLockContext(context.Background())
				ended <- err
			}()
		}
		for range 4 {
			isAll(t, <-ended, leased.ErrLocked)
		}
		time.Sleep(time.Second)
		unlock(t, l)
		unlock(t, <-reader)
	})
}

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
