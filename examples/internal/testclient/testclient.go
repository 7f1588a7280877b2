// Package testclient makes what the tests of the examples need: a real Redis, and clients
// that stand for processes.
package testclient

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Patience bounds what must happen at no particular time.
const Patience = 30 * time.Second

// Redis starts a server for the test and returns a connection to it.
func Redis(t *testing.T) (*redistest.Instance, *redis.Client) {
	t.Helper()
	server := redistest.Server(t)
	return server, Connect(t, server)
}

// Connect returns a client of the server that is closed with the test.
func Connect(t *testing.T, server *redistest.Instance) *redis.Client {
	t.Helper()
	rdb := server.Client(func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// Process returns a leased.Client of its own, which to Redis is another process. What it
// would log is discarded: the tests break things on purpose.
func Process(t *testing.T, rdb *redis.Client, opts ...leased.Option) *leased.Client {
	t.Helper()
	locks, err := leased.New(rdb, append([]leased.Option{leased.WithLogger(slog.New(slog.DiscardHandler))}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if err := locks.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	return locks
}
