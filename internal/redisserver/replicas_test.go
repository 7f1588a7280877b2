package redisserver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// pool is a client of one node, of a type of the user's, that nothing is sent through.
type pool struct {
	redis.UniversalClient
	options redis.Options
	stats   redis.PoolStats
}

func (p *pool) Options() *redis.Options     { return &p.options }
func (p *pool) PoolStats() *redis.PoolStats { return &p.stats }

// newOf makes a value of a type that go-redis does not export.
func newOf[T any](*T) *T { return new(T) }

func TestHalfOfAPoolMayWaitForReplicas(t *testing.T) {
	for name, c := range map[string]struct {
		rdb  redis.UniversalClient
		most int
	}{
		"one connection": {&pool{options: redis.Options{PoolSize: 1}}, 1},
		"nine":           {&pool{options: redis.Options{PoolSize: 9}}, 4},
		"pipelines have their own": {&pool{options: redis.Options{PoolSize: 100, PipelinePoolSize: 6},
			stats: redis.PoolStats{PipelineStats: newOf(redis.PoolStats{}.PipelineStats)}}, 3},
		"of the default number": {&pool{options: redis.Options{PoolSize: 100},
			stats: redis.PoolStats{PipelineStats: newOf(redis.PoolStats{}.PipelineStats)}}, 5},
	} {
		synctest.Test(t, func(t *testing.T) {
			all := turns{of: map[*redis.Client]*turn{}}
			const least = 1500 * time.Millisecond
			take := func() (func(), error) {
				ctx, cancel := context.WithTimeout(t.Context(), protocol.CommandTimeout)
				defer cancel()
				return all.take(ctx, c.rdb, least)
			}
			var taken []func()
			for range c.most {
				done, err := take()
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				taken = append(taken, done)
			}
			began := time.Now()
			_, err := take()
			if f := Classify(err); f == nil || f.Kind != protocol.NeverSent || time.Since(began) != protocol.CommandTimeout-least {
				t.Errorf("%s: one more gets %v after %v", name, err, time.Since(began))
			}
			time.AfterFunc(100*time.Millisecond, taken[0])
			began = time.Now()
			done, err := take()
			if err != nil || time.Since(began) != 100*time.Millisecond {
				t.Errorf("%s: one more gets %v after %v", name, err, time.Since(began))
			}
			for _, each := range append(taken[1:], done) {
				each()
			}
			if len(all.of) > 0 {
				t.Errorf("%s: %d are left", name, len(all.of))
			}
		})
	}
}
