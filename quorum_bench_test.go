package leased_test

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A free lock on five servers. Beside redsync and one server: internal/measure/redlock.
func BenchmarkQuorumLockUnlock(b *testing.B) {
	var rdbs []redis.UniversalClient
	for range 5 {
		s := redistest.Server(b)
		if err := s.Client().Set(context.Background(), "leased:quorum:mark", "1", 0).Err(); err != nil { // it may vote
			b.Fatal(err)
		}
		rdbs = append(rdbs, s.Client())
	}
	c, err := leased.NewQuorum(rdbs)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	mu := c.Mutex("x")
	for range 20 {
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // it connects
	}
	b.ReportAllocs()
	for b.Loop() {
		mu.Lock()
		mu.Unlock() //nolint:staticcheck // that is what is measured
	}
}
