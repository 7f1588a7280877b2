package redistest

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// Target is the server on which a test of a behavior suite runs.
type Target struct {
	// Name is "miniredis", "redis", or the name of the deployment.
	Name string
	// Real reports whether the server is a redis-server. Time is real on both kinds.
	Real bool
	// Addr is a loopback address.
	Addr string
	// Prefix is the test's own: every key and channel must start with it, because other
	// tests use a real server at the same time.
	Prefix string
	// Mini is the embedded server; nil on a real one.
	Mini *miniredis.Miniredis
	// Server is the shared real server; nil on the embedded one and in a Deployment.
	Server *Instance
	// Deployment is set if the target is not a plain server; see [Deployments].
	Deployment *Deployment
}

// OnBoth runs f as the parallel subtests "miniredis" and "redis". The embedded server is
// f's own. The real one is [Shared]; if there is none, its subtest is skipped. Both start
// only after the function that calls OnBoth has returned, so the call must be its last
// statement.
func OnBoth(t *testing.T, f func(t *testing.T, s Target)) {
	t.Helper()
	onBoth(t, f, true)
}

// InTurn is [OnBoth] with one subtest after the other, for tests that count something of
// the whole process.
func InTurn(t *testing.T, f func(t *testing.T, s Target)) {
	t.Helper()
	onBoth(t, f, false)
}

func onBoth(t *testing.T, f func(t *testing.T, s Target), parallel bool) {
	t.Helper()
	t.Run("miniredis", func(t *testing.T) {
		if parallel {
			t.Parallel()
		}
		m := MiniTCP(t)
		f(t, Target{Name: "miniredis", Addr: m.Addr(), Prefix: Prefix(t), Mini: m})
	})
	t.Run("redis", func(t *testing.T) {
		if parallel {
			t.Parallel()
		}
		in := Shared(t)
		f(t, Target{Name: "redis", Real: true, Addr: in.Addr, Prefix: Prefix(t), Server: in})
	})
}

// Options returns fresh options for a client of the server.
func (s Target) Options() *redis.Options { return Options(s.Addr) }

// NewClient returns a new client whose options the given functions may change. It is closed
// in tb's cleanup.
func (s Target) NewClient(tb testing.TB, change ...func(*redis.Options)) *redis.Client {
	return newClient(tb, s.Options(), change)
}

// Keys returns the keys under the test's prefix, sorted.
func (s Target) Keys(ctx context.Context) ([]string, error) {
	if s.Deployment != nil {
		var end host // its end closes the client below
		defer end.end()
		return Keys(ctx, s.Deployment.Admin(&end), s.Prefix)
	}
	rdb := redis.NewClient(s.Options())
	defer rdb.Close()
	return Keys(ctx, rdb, s.Prefix)
}

// Keys returns the keys that start with prefix, sorted, from all masters of a cluster.
func Keys(ctx context.Context, rdb redis.UniversalClient, prefix string) ([]string, error) {
	var keys []string
	err := eachMaster(ctx, rdb, func(ctx context.Context, node redis.Cmdable) error {
		scan := node.Scan(ctx, 0, literal(prefix)+"*", 1000).Iterator()
		for scan.Next(ctx) {
			keys = append(keys, scan.Val())
		}
		return scan.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("redistest: list keys: %w", err)
	}
	slices.Sort(keys)
	return slices.Compact(keys), nil // SCAN may name a key twice
}
