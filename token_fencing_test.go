package leased_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

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
		if err := operator.ForceUnlock(context.Background(), "x"); err != nil {
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
		if err := operator.ForceUnlock(context.Background(), "x"); err != nil {
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
