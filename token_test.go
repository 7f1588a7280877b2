package leased_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// tokens checks that each token is above the one before.
type tokens struct {
	last  uint64
	count int
}

func (k *tokens) next(t *testing.T, when string, token uint64) {
	t.Helper()
	if token <= k.last || token >= 1<<53 {
		t.Errorf("%s: token %d after %d", when, token, k.last)
	}
	k.last = token
	k.count++
}

func TestTokensGrowWithEveryLeaseOfAllClients(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		var k tokens
		var all sync.WaitGroup
		for range 3 {
			c := newClient(t, s, leased.WithLocalHandoffs(5, time.Millisecond))
			for range 5 {
				all.Go(func() {
					for range 20 {
						l := lock(t, c.Mutex("x"))
						k.next(t, "under contention", l.Token())
						unlock(t, l)
					}
				})
			}
		}
		all.Wait()
		if k.count != 300 {
			t.Errorf("%d leases", k.count)
		}
	})
}

func TestTokensGrowWithinOneMicrosecond(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		began := time.Now()
		for _, idle := range []time.Duration{0, time.Hour} {
			c := newClient(t, s, leased.WithIdleHold(idle))
			var k tokens
			for range 100 { // time stands still but for what the client waits
				l := lock(t, c.Mutex("x"))
				k.next(t, "in one microsecond", l.Token())
				if clock := uint64(time.Now().UnixMicro()); l.Token() > clock+s.lead() {
					t.Errorf("token %d is ahead of the clock, %d", l.Token(), clock)
				}
				unlock(t, l)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("200 leases waited %v for the clock", took)
		}
	})
}

func TestTokensGrowAcrossAFlush(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		a, b := newClient(t, s), newClient(t, s)
		var k tokens
		for range 20 {
			for _, c := range []*leased.Client{a, b, b} {
				l := lock(t, c.Mutex("x"))
				k.next(t, "after a flush", l.Token())
				unlock(t, l)
				keys, err := s.Keys(context.Background()) // the server is others' too
				if s.Addr == "" || err != nil {
					t.Fatal(err)
				}
				if len(keys) == 0 {
					t.Fatal("no token was kept: nothing to forget")
				}
				s.rdb.Del(context.Background(), keys...)
			}
		}
	})
}

// Nor does a reader that joins a grant which was lost unnoticed have a token above that of the writer in between: a
// resource that has stored that one refuses it.
func TestAReaderThatJoinsALostGrantHasASmallerTokenThanTheWriterInBetween(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		readers, other := newClient(t, s), newClient(t, s)
		warm(t, s, readers, other)
		first := take(t, readers.RWMutex("x").RLockContext)
		time.Sleep(time.Second)
		s.forget(t)
		writer := lock(t, other.Mutex("x"))
		unlock(t, writer)
		joined := take(t, readers.RWMutex("x").RLockContext)
		if joined.Token() >= writer.Token() {
			t.Errorf("a reader's token %d after a writer's %d", joined.Token(), writer.Token())
		}
		must(t, first.Unlock()) // Redis is not asked, because another reader goes on
		isAll(t, joined.Unlock(), leased.ErrLeaseLost)
	})
}

func TestTokensGrowAcrossTheExpiryOfAllKeys(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var k tokens
		for _, c := range []*leased.Client{newClient(t, s), newClient(t, s)} {
			for range 3 {
				l := lock(t, c.Mutex("x"))
				k.next(t, "after a day", l.Token())
				unlock(t, l)
				time.Sleep(24 * time.Hour)
				if left := s.lockKeys(t); len(left) != 0 {
					t.Errorf("still there: %v", left)
				}
			}
		}
	})
}

func TestTheLastTokenIsKeptWhileALockIsHeld(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		_, _, _, meta := s.helperKeys("x")
		for range 12 {
			time.Sleep(15 * time.Minute)
			if left := s.rdb.PTTL(context.Background(), meta).Val(); left <= 0 {
				t.Fatalf("its key has the TTL %v", left)
			}
		}
		unlock(t, l)
	})
}

// A token that is ahead of the server's clock is the only thing that the next one is counted
// from until the clock has reached it.
func TestALastTokenAheadOfTheClockIsKeptUntilTheClockHasReachedIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s)
		unlock(t, lock(t, c.Mutex("x")))
		s.Mini.SetTime(time.Now().Add(-time.Hour))
		l := lock(t, newClient(t, s).Mutex("x"))
		_, _, _, meta := s.helperKeys("x")
		for _, when := range []time.Duration{0, 5 * time.Minute} { // as acquired, and as kept alive by the holder
			time.Sleep(when)
			if left := s.rdb.PTTL(context.Background(), meta).Val(); left < time.Hour+when-10*time.Minute {
				t.Errorf("after %v its key has the TTL %v", when, left)
			}
		}
		unlock(t, l)
	})
}

func TestTokensGrowWhenTheServersClockJumps(t *testing.T) {
	for what, jump := range map[string]time.Duration{"back": -30 * time.Second, "forward": time.Minute} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var k tokens
				a, b := newClient(t, s), newClient(t, s)
				use := func(when string) {
					// A new client remembers no token: the server's count.
					for _, c := range []*leased.Client{newClient(t, s), a, b, b, a} {
						l := lock(t, c.Mutex("x"))
						k.next(t, when, l.Token())
						unlock(t, l)
					}
				}
				use("before")
				s.Mini.SetTime(time.Now().Add(jump))
				use("after a jump " + what)
				s.Mini.SetTime(time.Now())
				use("after it was put right")
			})
		})
	}
}

func TestTokensOfAnEvictedOwnerAreBelowThoseOfTheNext(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		evicted := lock(t, newClient(t, s).Mutex("x"))
		c := newClient(t, s)
		if _, err := c.ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		next := lock(t, c.Mutex("x"))
		if next.Token() <= evicted.Token() {
			t.Errorf("token %d after %d", next.Token(), evicted.Token())
		}
		unlock(t, next)
		isAll(t, evicted.Unlock(), leased.ErrLeaseLost)
	})
}

// A check is answered by a renewal of its own, which keeps no token.
func TestVirtualTheLastTokenIsKeptAliveHoweverOftenTheLeaseIsChecked(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(30*time.Second))
		l := lock(t, c.Mutex("x"))
		_, _, _, meta := s.helperKeys("x")
		for range 11 * 12 {
			time.Sleep(5 * time.Second)
			if err := l.Check(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		if left := s.rdb.PTTL(context.Background(), meta).Val(); left < 7*time.Minute {
			t.Errorf("the token lives on for %v", left)
		}
		unlock(t, l)
	})
}

// The renewal that keeps the token alive is the first to see the clock that was set back.
func TestVirtualATokenThatIsAheadOfTheClockIsKeptUntilTheClockHasReachedIt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s, leased.WithTTL(30*time.Second)).Mutex("x"))
		time.Sleep(145 * time.Second) // the token is kept alive each 150 s, in a renewal each 10 s
		s.Mini.SetTime(time.Now().Add(-time.Hour))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		_, _, _, meta := s.helperKeys("x")
		if left := s.rdb.PTTL(context.Background(), meta).Val(); left < 67*time.Minute || left > 68*time.Minute {
			t.Errorf("the token lives on for %v", left)
		}
		unlock(t, l)
	})
}

func TestVirtualTheLastTokenIsKeptAliveEachQuarterOfItsLife(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(30*time.Second))
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Minute + time.Millisecond)
		synctest.Wait()
		before := s.commands(c)
		_, _, _, meta := s.helperKeys("x")
		const life = 10 * time.Minute
		for range 2 * 360 {
			time.Sleep(10 * time.Second)
			if left := s.rdb.PTTL(context.Background(), meta).Val(); left < life*3/4-10*time.Second || left > life {
				t.Fatalf("the token lives on for %v", left)
			}
		}
		synctest.Wait()
		// A renewal each 10 s, a touch each 150 s, an echo each 20 or 30 s.
		if n := s.commands(c) - before; n < 720+48+240 || n > 720+48+360 {
			t.Errorf("%d commands in two hours", n)
		}
		unlock(t, l)
	})
}

// Each writer's lease then needs a token from Redis.
func TestVirtualAnIdleHoldSavesNoCommandWhileTheClockIsBehindTheLastToken(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(30*time.Second))
		mu := c.Mutex("x", leased.WithIdleHold(time.Minute))
		unlock(t, lock(t, mu))
		time.Sleep(time.Second) // until its inbox has proved itself
		synctest.Wait()
		const cycles = 10
		spent := func() int64 {
			before := s.commands(c)
			for range cycles {
				unlock(t, lock(t, mu))
			}
			synctest.Wait()
			return s.commands(c) - before
		}
		if n := spent(); n != 0 {
			t.Errorf("%d commands while the clock is right", n)
		}
		s.Mini.SetTime(time.Now().Add(-time.Hour))
		time.Sleep(15 * time.Second)                      // until a renewal has told
		if n := spent(); n < cycles && s.members == nil { // on a quorum, tokens may go back when clocks do
			t.Errorf("%d commands for %d leases while the clock is an hour behind", n, cycles)
		}
	})
}

// fencedStore is a resource that does as Lease.Token says.
type fencedStore struct {
	rdb redis.UniversalClient
	key string
}

// reads reports whether a read under the token was let in.
func (s fencedStore) reads(t *testing.T, token uint64) bool {
	t.Helper()
	err := look.Run(context.Background(), s.rdb, []string{s.key}, token).Err()
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	return err == nil
}

// writes reports whether an access that reads, then writes, was let in.
func (s fencedStore) writes(t *testing.T, token uint64, stock int) bool {
	t.Helper()
	err := present.Run(context.Background(), s.rdb, []string{s.key}, token).Err()
	if errors.Is(err, redis.Nil) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	n, err := put.Run(context.Background(), s.rdb, []string{s.key}, token, stock).Int()
	if err != nil {
		t.Fatal(err)
	}
	return n == 1
}

func newFencedStore(t *testing.T, s place) fencedStore {
	t.Helper()
	store := fencedStore{s.rdb, s.Prefix + "item"}
	if err := s.rdb.HSet(context.Background(), store.key, "stock", "50").Err(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.rdb.Del(context.Background(), store.key) })
	return store
}

func rlock(t *testing.T, rw *leased.RWMutex) *leased.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := rw.RLockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// A reader that joins the readers of its process has the token of their grant, however
// late it comes. So tokens of readers in different processes are in no order, and a
// store that kept a reader's would refuse honest readers.
func TestTheFencingRecipeRefusesNoHonestReaderThoughReadersTokensAreInNoOrder(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		store := newFencedStore(t, s)
		a, b, w := newClient(t, s), newClient(t, s), newClient(t, s)
		naive, refusedByNaive, before := uint64(0), 0, 0
		rng := rand.New(rand.NewPCG(1, 2))
		for round := range 10 {
			writer, err := w.RWMutex("x").LockContext(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if !store.writes(t, writer.Token(), 50-round) {
				t.Errorf("round %d: an honest writer was refused", round)
			}
			naive = max(naive, writer.Token())
			unlock(t, writer)

			first := []*leased.Lease{rlock(t, a.RWMutex("x")), rlock(t, b.RWMutex("x"))}
			if first[0].Token() >= first[1].Token() {
				t.Fatalf("tokens %d and %d: the second grant's is not above the first's", first[0].Token(), first[1].Token())
			}
			leases := first
			last := uint64(0)
			for range 10 {
				c := []*leased.Client{a, b}[rng.IntN(2)]
				l := rlock(t, c.RWMutex("x"))
				leases = append(leases, l)
				if l.Token() < last {
					before++
				}
				last = l.Token()
			}
			for _, l := range leases {
				if l.Token() <= writer.Token() {
					t.Errorf("a reader's token %d is not above the last writer's, %d", l.Token(), writer.Token())
				}
				if !store.reads(t, l.Token()) {
					t.Errorf("round %d: an honest read was refused", round)
				}
				if l.Token() < naive {
					refusedByNaive++
				}
				naive = max(naive, l.Token())
			}
			for _, l := range leases {
				unlock(t, l)
			}
		}
		if before == 0 || refusedByNaive == 0 {
			t.Errorf("%d readers came after one with a greater token, and %d would be refused if readers' tokens were kept: nothing was shown", before, refusedByNaive)
		}
	})
}

func TestTheFencingRecipeRefusesStaleReadersAndWriters(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		store := newFencedStore(t, s)
		a, b, w, operator := newClient(t, s), newClient(t, s), newClient(t, s), newClient(t, s)
		readers := []*leased.Lease{rlock(t, a.RWMutex("x")), rlock(t, b.RWMutex("x"))}
		if _, err := operator.ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		writer, err := w.RWMutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if !store.writes(t, writer.Token(), 49) {
			t.Error("the owner was refused")
		}
		for _, l := range readers {
			if store.reads(t, l.Token()) {
				t.Errorf("a read with token %d was let in after a write with %d", l.Token(), writer.Token())
			}
		}
		if _, err := operator.ForceUnlock(context.Background(), "x"); err != nil {
			t.Fatal(err)
		}
		next := lock(t, operator.Mutex("x"))
		if err := present.Run(context.Background(), s.rdb, []string{store.key}, next.Token()).Err(); err != nil {
			t.Fatal(err)
		}
		if store.writes(t, writer.Token(), 48) {
			t.Error("a writer that lost its lease wrote after the next had read")
		}
		if n, err := put.Run(context.Background(), s.rdb, []string{store.key}, next.Token(), 48).Int(); n != 1 || err != nil {
			t.Errorf("the present owner's write: %d, %v", n, err)
		}
		unlock(t, next)
		for _, l := range append(readers, writer) {
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
	})
}

// After a downgrade a lease has a reader's token: a store that kept it would refuse
// readers that joined earlier.
func TestTheTokenOfADowngradedLeaseIsNotToBeStored(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		store := newFencedStore(t, s)
		a, b := newClient(t, s), newClient(t, s)
		l, err := a.RWMutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		wrote := l.Token()
		if !store.writes(t, wrote, 49) {
			t.Fatal("the owner was refused")
		}
		if err := l.Downgrade(context.Background()); err != nil {
			t.Fatal(err)
		}
		other := rlock(t, b.RWMutex("x"))
		late := rlock(t, a.RWMutex("x"))
		if l.Token() <= wrote || late.Token() != l.Token() || other.Token() <= late.Token() {
			t.Errorf("tokens: written with %d, downgraded %d, another process %d, then a reader of the first %d",
				wrote, l.Token(), other.Token(), late.Token())
		}
		if kept, err := s.rdb.HGet(context.Background(), store.key, "token").Result(); kept != strconv.FormatUint(wrote, 10) {
			t.Errorf("the store keeps %s, %v", kept, err)
		}
		for _, lease := range []*leased.Lease{l, other, late} {
			if !store.reads(t, lease.Token()) {
				t.Errorf("an honest read with token %d was refused", lease.Token())
			}
			unlock(t, lease)
		}
	})
}
