package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/measure/figures"
)

// raw is the textbook lock: SET NX PX with a random value, and a script that
// deletes the key if it still has that value. Nothing cheaper deserves to be called a lock.
type raw struct {
	rdb    *redis.Client
	key    string
	delete *redis.Script
}

func newRaw(rdb *redis.Client, key string) *raw {
	return &raw{rdb, key, redis.NewScript(`
		if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
		return 0`)}
}

func (r *raw) cycle(ctx context.Context) error {
	var bits [16]byte
	_, _ = rand.Read(bits[:]) // never fails
	value := base64.RawURLEncoding.EncodeToString(bits[:])
	if ok, err := r.rdb.SetNX(ctx, r.key, value, 30*time.Second).Result(); err != nil || !ok {
		return fmt.Errorf("raw lock: %t, %w", ok, err)
	}
	return r.delete.Run(ctx, r.rdb, []string{r.key}, value).Err()
}

// cycle measures locking and unlocking a lock that nobody else wants.
func cycle(b *bench) error {
	ctx := context.Background()
	c, err := b.client()
	if err != nil {
		return err
	}
	defer c.Close()
	base := newRaw(b.server.Client(), "raw")
	mu := c.Mutex("ours")
	kinds := []struct {
		what  string
		sends []string // SET is what our scripts call, not what we send
		do    func() error
	}{
		{"SET NX PX + EVALSHA", []string{"set", "evalsha"}, func() error { return base.cycle(ctx) }},
		{"Lock + Unlock", []string{"evalsha"}, func() error { mu.Lock(); mu.Unlock(); return nil }}, //nolint:staticcheck // an empty section is what is measured
		{"LockContext + Unlock", []string{"evalsha"}, func() error {
			l, err := mu.LockContext(ctx)
			if err != nil {
				return err
			}
			return l.Unlock()
		}},
	}
	const block = 200
	all := make([]times, len(kinds))
	ratios := make([][]float64, len(kinds))
	server := make([]spent, len(kinds))
	rounds := b.pick(60, 10)
	for round := range rounds + 1 {
		mid := make([]time.Duration, len(kinds))
		for n := range kinds {
			i := (n + round) % len(kinds) // no kind is always first
			before, err := spend(ctx, b.rdb, kinds[i].sends...)
			if err != nil {
				return err
			}
			took := make(times, block)
			for j := range took {
				began := time.Now()
				if err := kinds[i].do(); err != nil {
					return err
				}
				took[j] = time.Since(began)
			}
			after, err := spend(ctx, b.rdb, kinds[i].sends...)
			if err != nil {
				return err
			}
			if round == 0 {
				continue // loads scripts, makes connections, fills caches
			}
			mid[i] = took.at(.5)
			all[i] = append(all[i], took...)
			server[i] = server[i].add(after.sub(before))
		}
		for i := range kinds {
			if round > 0 {
				ratios[i] = append(ratios[i], figures.Ratio(mid[i], mid[0]))
			}
		}
	}
	b.rows.add(kinds[0].what, all[0].String(), "", "")
	for i := 1; i < len(kinds); i++ {
		r := figures.Median(ratios[i])
		b.rows.add(kinds[i].what, all[i].String(), fmt.Sprintf("× %.3f raw", r), atMost("1.10", r <= 1.10))
		n := float64(server[i].calls) / float64(rounds*block)
		b.rows.add("  commands per cycle", fmt.Sprintf("%.3f", n), "2", "2: "+mark(n == 2))
		b.rows.add("  of it inside the server", server[i].each(rounds*block), server[0].each(rounds*block), "")
	}
	return nil
}
