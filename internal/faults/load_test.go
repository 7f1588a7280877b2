//go:build unix

package faults

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// underLoad has two clients share a lock while disturb runs again and again. It demands
// that all callers enter, one at a time, and that a release fails only if its answer was lost:
// if such a release let the next process in, nothing can prove anymore that the lock was
// ours until then. Each disturbance may take the answers of perHit releases.
func underLoad(t *testing.T, disturb func(context.Context, *redis.Client) error, pause time.Duration, perHit int64) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	strain, began := redistest.NewStrain(t), time.Now()
	admin := s.Client()
	clients := []*leased.Client{newClient(t, s.Client(), ""), newClient(t, s.Client(), "")}
	turns, times := int64(400), int64(min(500, 2*time.Second/pause))
	if testing.Short() {
		turns, times = turns/2, times/2
	}
	ctx, enough := context.WithCancel(within(t, 3*patience))
	defer enough()
	count, entered := 0, atomic.Int64{} // count is plain: only the lock guards it
	var inside, hits, unproved atomic.Int64
	var all sync.WaitGroup
	for _, c := range clients {
		for range 4 {
			all.Go(func() {
				for ctx.Err() == nil {
					l, err := c.Mutex("x").LockContext(t.Context())
					if err != nil {
						t.Errorf("LockContext: %v", err)
						return
					}
					if n := inside.Add(1); n != 1 {
						t.Errorf("%d inside at once", n)
					}
					count++
					entered.Add(1)
					inside.Add(-1)
					switch err := l.Unlock(); {
					case err == nil:
					case isUnproved(err):
						unproved.Add(1)
					default:
						t.Errorf("Unlock: %v", err)
						return
					}
				}
			})
		}
	}
	all.Go(func() {
		defer enough()
		// Disturbances that come too often would leave no time for anything else, so somebody must
		// enter between two of them, however long that takes.
		beat := time.NewTicker(pause)
		defer beat.Stop()
		for ctx.Err() == nil && (hits.Load() < times || entered.Load() < turns) {
			before := entered.Load()
			if err := disturb(t.Context(), admin); err != nil {
				t.Errorf("disturbing: %v", err)
			}
			hits.Add(1)
			for again := true; again && ctx.Err() == nil; again = entered.Load() == before {
				select {
				case <-beat.C:
				case <-ctx.Done():
				}
			}
		}
	})
	all.Wait()
	if n := entered.Load(); n < turns || hits.Load() < times || int64(count) != n {
		t.Errorf("%d entered, the plain counter says %d, disturbed %d times", n, count, hits.Load())
	}
	var lost int64
	for _, c := range clients {
		lost += c.Stats().Lost
		nothingLeft(t, c, "x")
	}
	stalls := int64(strain.Since(began) / (500 * time.Millisecond)) // in each, releases can go without an answer
	if lost != unproved.Load() || unproved.Load() > perHit*hits.Load()+4*stalls {
		t.Errorf("%d leases were lost, and %d releases had no answer, in %d disturbances", lost, unproved.Load(), hits.Load())
	}
	t.Logf("%d entered, disturbed %d times, %d releases unproved", entered.Load(), hits.Load(), unproved.Load())
}

func TestForgottenScriptsAreSentAgainUnderLoad(t *testing.T) {
	underLoad(t, func(ctx context.Context, rdb *redis.Client) error {
		return rdb.ScriptFlush(ctx).Err()
	}, time.Millisecond, 0)
}

func TestKilledConnectionsLoseNothingUnderLoad(t *testing.T) {
	underLoad(t, func(ctx context.Context, rdb *redis.Client) error {
		return rdb.ClientKillByFilter(ctx, "TYPE", "normal").Err()
	}, 40*time.Millisecond, 2) // it can hit one connection of each client
}

func TestKilledSubscriptionsLoseNothingUnderLoad(t *testing.T) {
	underLoad(t, func(ctx context.Context, rdb *redis.Client) error {
		return rdb.ClientKillByFilter(ctx, "TYPE", "pubsub").Err()
	}, 40*time.Millisecond, 0)
}

// A full server must take back the locks it gave out, or it would stay full of them.
func TestAFullServerStillHandsOverRenewsReleasesAndCancels(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t, "--maxmemory-policy", "noeviction")
	redistest.CheckLeaks(t, nil, "")
	ctx, rdb := t.Context(), s.Client()
	if v := version(t, rdb); strings.HasPrefix(v, "6.") {
		t.Skipf("Redis %s answers a refusal inside a script as any other error", v)
	}
	const ttl = 6 * time.Second
	first := newClient(t, rdb, "", leased.WithTTL(ttl))
	second := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	third := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	l := mustLock(t, first.Mutex("x"))
	idle := mustLock(t, first.Mutex("released alone"))
	next := wait(within(t, patience), second.Mutex("x"))
	queued(t, first, "x", 1)
	canceled, cancel := context.WithCancel(ctx)
	never := wait(canceled, third.Mutex("x"))
	queued(t, first, "x", 2)

	if err := rdb.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if err := rdb.Set(ctx, "k", "v", time.Second).Err(); !redis.HasErrorPrefix(err, "OOM") {
		t.Fatalf("the server is not full: %v", err)
	}
	justRenewed(t, first, 2)
	if err := l.Context().Err(); err != nil {
		t.Fatalf("the lease ended: %v", context.Cause(l.Context()))
	}
	cancel()
	if r := <-never; !errors.Is(r.err, context.Canceled) {
		t.Errorf("the canceled wait returned %v", r.err)
	}
	queued(t, first, "x", 1)
	mustUnlock(t, idle)
	nothingLeft(t, first, "released alone")
	mustUnlock(t, l)
	r := entered(t, next)
	if handed := first.Stats().Handed; handed != 1 {
		t.Errorf("the full server made %d processes owner", handed)
	}
	justRenewed(t, second, 1)
	// The library would retry a failed release by a cancel, so we look for refusals.
	if n := refusals(t, rdb); n != 0 {
		t.Errorf("the full server refused %d commands of locks", n)
	}

	// New requests have to wait until there is room.
	short, stop := context.WithCancel(ctx)
	defer stop()
	refused := wait(short, first.Mutex("new"))
	// When the client asks for the second time, it has heard the first answer.
	eventually(t, "two refusals", func() bool { return refusals(t, rdb) >= 2 })
	stop()
	if err := (<-refused).err; !errors.Is(err, leased.ErrNotAcquired) || !errors.Is(err, context.Canceled) || !isOOM(err) {
		t.Errorf("a new lock on a full server: %v", err)
	}
	waits := wait(within(t, patience), first.Mutex("new"))
	mustUnlock(t, r.lease)
	nothingLeft(t, first, "x")
	if err := rdb.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	mustUnlock(t, entered(t, waits).lease)
}

// The server is full before it sees the script of a downgrade for the first time.
func TestAFullServerCarriesOutADowngradeAndLetsTheReadersBehindItIn(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t, "--maxmemory-policy", "noeviction")
	redistest.CheckLeaks(t, nil, "")
	rdb := s.Client()
	const ttl = 6 * time.Second
	first := newClient(t, rdb, "", leased.WithTTL(ttl))
	second := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	third := newClient(t, s.Client(), "", leased.WithTTL(ttl))
	l := entered(t, calling(within(t, patience), first.RWMutex("x").LockContext)).lease
	token := l.Token()
	reads := calling(within(t, patience), second.RWMutex("x").RLockContext)
	queued(t, first, "x", 1)
	writes := calling(within(t, patience), third.RWMutex("x").LockContext)
	queued(t, first, "x", 2)
	if err := rdb.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if err := rdb.Set(t.Context(), "k", "v", time.Second).Err(); !redis.HasErrorPrefix(err, "OOM") {
		t.Fatalf("the server is not full: %v", err)
	}

	if err := l.Downgrade(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	if l.Token() <= token {
		t.Errorf("token %d after %d", l.Token(), token)
	}
	r := entered(t, reads)
	justRenewed(t, first, 2)
	justRenewed(t, second, 2)
	for _, lease := range []*leased.Lease{l, r.lease} {
		if lease.Context().Err() != nil {
			t.Errorf("a reader's lease ended: %v", context.Cause(lease.Context()))
		}
		mustUnlock(t, lease)
	}
	mustUnlock(t, entered(t, writes).lease)
	nothingLeft(t, first, "x")
	if n := refusals(t, rdb); n != 0 {
		t.Errorf("the full server refused %d commands of locks", n)
	}
}

func isOOM(err error) bool {
	var answer redis.Error
	return errors.As(err, &answer) && redis.HasErrorPrefix(answer, "OOM")
}

// version returns the version of Redis that the server is, or claims to be compatible with.
func version(t *testing.T, rdb *redis.Client) string {
	t.Helper()
	info, err := rdb.Info(t.Context(), "server").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "redis_version:")
	v, _, _ := strings.Cut(rest, "\r\n")
	return v
}

// refusals returns how many scripts have failed, other than because the server did not know them: in
// these tests, because it was full. A refusal inside a script need not make it fail: a shortcut of a
// re-check tries its write, and if that is refused leaves the work to the long way.
func refusals(t *testing.T, rdb *redis.Client) (n int) {
	t.Helper()
	info, err := rdb.Info(t.Context(), "all").Result() // Redis 6 takes one section
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(info) {
		what, stats, _ := strings.Cut(strings.TrimSpace(line), ":")
		field, sign := "failed_calls=", 1
		switch what {
		case "cmdstat_evalsha":
		case "errorstat_NOSCRIPT":
			field, sign = "count=", -1
		default:
			continue
		}
		_, rest, _ := strings.Cut(stats, field)
		number, _, _ := strings.Cut(rest, ",")
		count, err := strconv.Atoi(number)
		if err != nil {
			t.Fatal(err)
		}
		n += sign * count
	}
	return n
}
