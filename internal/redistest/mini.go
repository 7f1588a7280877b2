package redistest

import (
	"context"
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
// notifications are off: they look the address up, which a synctest bubble does
// not survive, and no server here sends any.
func Options(addr string) *redis.Options {
	return &redis.Options{
		Addr:                     addr,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}

// Mini returns an embedded server whose keys expire as time passes, by the fake
// clock inside a testing/synctest bubble. It does not listen: talk to it through
// [MiniOptions] or [MiniClient]. It is closed in tb's cleanup, so inside a bubble
// tb is the bubble's own.
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

// Needs64Bits skips a test that needs the embedded server where an int has 32 bits. There
// that server cuts the numbers that scripts return, tokens and clocks, to 32 bits, and refuses
// PEXPIREAT, whose argument it reads as an int. A real server is not concerned, so what has
// to hold on such machines is tested on one.
func Needs64Bits(tb testing.TB) {
	tb.Helper()
	if strconv.IntSize < 64 {
		tb.Skip("the embedded server, miniredis, cuts what scripts return to an int, which has 32 bits here")
	}
}

// LastInBubble goes first in a testing/synctest bubble that has a client in it. In
// tb's cleanup, after all others, it lets a minute of the bubble's time pass.
//
// A pool of go-redis that failed to dial as often as it has places, ten for each
// processor, tries on in the background, each second, and waits for nobody when it
// is closed. A bubble's time stands still when its test has returned, and it panics
// if somebody sleeps in it then.
func LastInBubble(tb testing.TB) {
	tb.Cleanup(func() { time.Sleep(time.Minute) })
}

// MiniTCP is [Mini] with a loopback port, m.Addr(). It is of no use in a bubble.
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
	// The address is never dialled, but a host name in its place would be resolved.
	o := Options("127.0.0.1:0")
	o.Dialer = func(context.Context, string, string) (net.Conn, error) {
		conn, err := m.Dial()
		if err != nil {
			return nil, err
		}
		return memconn.Buffered(conn), nil
	}
	return o
}

// MiniClient returns a client that reaches m without a network, with options
// changed as told. It is closed in tb's cleanup.
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
