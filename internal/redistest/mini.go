package redistest

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/leasedmutex/leased/internal/memconn"
)

// Options returns fresh options for a client of the server at addr. Maintenance
// notifications are off: they resolve the address, which does not work in a synctest
// bubble, and no server here sends any.
func Options(addr string) *redis.Options {
	return &redis.Options{
		Addr:                     addr,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}

// Mini returns an embedded server whose keys expire as time passes, which inside a
// testing/synctest bubble is the bubble's time. It does not listen on a port: talk to it
// through [MiniOptions] or [MiniClient]. It is closed in tb's cleanup, so inside a bubble
// tb must be the bubble's own.
//
// One subscriber that stops reading blocks the whole server.
func Mini(tb testing.TB) *miniredis.Miniredis {
	tb.Helper()
	Needs64Bits(tb)
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	tb.Cleanup(m.Close)
	return m
}

// Needs64Bits skips a test that needs the embedded server if an int has 32 bits. There, that
// server truncates the numbers that scripts return (tokens and clocks) to 32 bits, and refuses
// PEXPIREAT, whose argument it parses as an int. A real server has no such limit, so what must
// hold on such machines is tested on a real one.
func Needs64Bits(tb testing.TB) {
	tb.Helper()
	if strconv.IntSize < 64 {
		tb.Skip("the embedded server, miniredis, cuts what scripts return to an int, which has 32 bits here")
	}
}

// LastInBubble must come first in a testing/synctest bubble that has a client in it. In
// tb's cleanup, after all others, it lets a minute of the bubble's time pass.
//
// When a connection pool of go-redis has failed to dial as often as it has places (ten per
// processor), it goes on trying every second in the background, and closing it does not wait
// for that goroutine. Once a bubble's test has returned, the bubble's time stands still, and
// the bubble panics if a goroutine in it is still sleeping.
func LastInBubble(tb testing.TB) {
	tb.Cleanup(func() { time.Sleep(time.Minute) })
}

// MiniTCP is [Mini] listening on a loopback port, m.Addr(). It cannot be used in a bubble.
func MiniTCP(tb testing.TB) *miniredis.Miniredis {
	tb.Helper()
	m := Mini(tb)
	if err := m.Start(); err != nil {
		tb.Fatalf("redistest: start miniredis: %v", err)
	}
	return m
}

// MiniOptions returns fresh options for a client that reaches m without a network.
func MiniOptions(m *miniredis.Miniredis) *redis.Options {
	// The address is never dialed, but a host name in its place would be resolved. Each server has
	// its own, because a quorum refuses two clients of one address.
	o := Options(fmt.Sprintf("127.0.0.1:%p", m))
	o.PoolSize = 1000 // the default follows the number of processors, and tests have to pass with one
	o.Dialer = func(context.Context, string, string) (net.Conn, error) {
		conn, err := m.Dial()
		if err != nil {
			return nil, err
		}
		return memconn.Buffered(conn), nil
	}
	return o
}

// MiniClient returns a client that reaches m without a network. The given functions may
// change its options. It is closed in tb's cleanup.
func MiniClient(tb testing.TB, m *miniredis.Miniredis, change ...func(*redis.Options)) *redis.Client {
	return newClient(tb, MiniOptions(m), change)
}

func newClient(tb testing.TB, o *redis.Options, change []func(*redis.Options)) *redis.Client {
	for _, c := range change {
		c(o)
	}
	rdb := redis.NewClient(o)
	tb.Cleanup(func() { _ = rdb.Close() }) // a test may have closed it already
	return rdb
}
