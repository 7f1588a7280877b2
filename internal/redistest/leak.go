package redistest

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/source"
)

const (
	leakLabel = "leased-test"

	// The pause between two attempts, each of which reads the stacks of all goroutines, doubles:
	// in virtual time, thousands of attempts would otherwise be made while waiting for one timer.
	firstLeakPause, maxLeakPause = 2 * time.Millisecond, 100 * time.Millisecond

	// leakWithin gives goroutines time to end by themselves; one with a command under way
	// takes up to 2 s. Only a test that leaks takes this long.
	leakWithin = 15 * time.Second
)

var leakChecks atomic.Int64

// CheckLeaks fails tb, at its end, if the test left anything behind:
//
//   - a goroutine with a function of this module on its stack,
//   - a key under prefix that never expires, except those named in lasting and the marks
//     of a quorum's server, which has one for each prefix of a client,
//   - a pub/sub channel that starts with prefix and has a subscriber.
//
// Anything that is about to go is given time to go.
//
// Cleanups run in reverse order, so the order of the calls matters: first rdb, whose
// cleanup closes it, then CheckLeaks, then everything that must be gone by the end:
//
//	s := redistest.Shared(t)
//	rdb, prefix := s.Client(), redistest.Prefix(t)
//	redistest.CheckLeaks(t, rdb, prefix)
//	client := newLeasedClient(t, ...) // t.Cleanup(client.Close)
//
// CheckLeaks labels the test's goroutine. Goroutines inherit labels, and only those with
// the label are examined, so tests may run in parallel and goroutines of earlier tests do
// not count. For the same reason, a goroutine started by time.AfterFunc or by a cleanup
// function of the runtime is not seen. If the server does not live until the end, rdb is
// nil, and only goroutines are checked.
func CheckLeaks(tb testing.TB, rdb redis.UniversalClient, prefix string, lasting ...string) {
	tb.Helper()
	checkLeaks(tb, leakWithin, rdb, prefix, lasting)
}

func checkLeaks(tb testing.TB, within time.Duration, rdb redis.UniversalClient, prefix string, lasting []string) {
	tb.Helper()
	mark := fmt.Sprintf("%s.%d", tb.Name(), leakChecks.Add(1))
	pprof.SetGoroutineLabels(pprof.WithLabels(context.Background(), pprof.Labels(leakLabel, mark)))
	tb.Cleanup(func() {
		tb.Helper()
		until := time.Now().Add(within)
		patiently(tb, until, func() error { return leakedGoroutines(mark) })
		if rdb != nil {
			patiently(tb, until, func() error { return leakedChannels(rdb, prefix) })
			patiently(tb, until, func() error { return leakedKeys(rdb, prefix, lasting) })
		}
	})
}

// patiently calls find until it finds nothing or time is up. No event tells when a
// goroutine has ended, or when a server has noticed that a connection was closed.
func patiently(tb testing.TB, until time.Time, find func() error) {
	tb.Helper()
	for pause := firstLeakPause; ; pause = min(2*pause, maxLeakPause) {
		err := find()
		if err == nil {
			return
		}
		if time.Now().After(until) {
			tb.Error(err)
			return
		}
		time.Sleep(pause)
	}
}

// leakedGoroutines reads the goroutine profile, in which goroutines with the same
// stack and labels are one paragraph.
func leakedGoroutines(mark string) error {
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		return fmt.Errorf("redistest: goroutine profile: %w", err)
	}
	label := strconv.Quote(leakLabel) + ":" + strconv.Quote(mark)
	var leaked []string
	for stack := range strings.SplitSeq(profile.String(), "\n\n") {
		if strings.Contains(stack, label) && strings.Contains(stack, source.Module) &&
			!strings.Contains(stack, "redistest.leakedGoroutines") { // the goroutine that is asking
			leaked = append(leaked, stack)
		}
	}
	if leaked == nil {
		return nil
	}
	return fmt.Errorf("redistest: goroutines left behind:\n%s", strings.Join(leaked, "\n\n"))
}

func leakedChannels(rdb redis.UniversalClient, prefix string) error {
	leaked, err := Channels(context.Background(), rdb, prefix)
	if err != nil {
		return err
	}
	if leaked != nil {
		return fmt.Errorf("redistest: channels left behind: %q", leaked)
	}
	return nil
}

// Channels lists the pub/sub channels that start with prefix and have a subscriber. A node
// of a Cluster knows only its own subscribers, so all masters are asked.
func Channels(ctx context.Context, rdb redis.UniversalClient, prefix string) ([]string, error) {
	var all []string
	err := eachMaster(ctx, rdb, func(ctx context.Context, node redis.Cmdable) error {
		channels, err := node.PubSubChannels(ctx, literal(prefix)+"*").Result()
		all = append(all, channels...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("redistest: list channels: %w", err)
	}
	return all, nil
}

func leakedKeys(rdb redis.UniversalClient, prefix string, lasting []string) error {
	ctx := context.Background()
	keys, err := Keys(ctx, rdb, prefix)
	if err != nil {
		return err
	}
	may := map[string]bool{}
	for _, k := range lasting {
		may[k] = true
	}
	var leaked []string
	for _, k := range keys {
		left, err := rdb.PTTL(ctx, k).Result()
		if err != nil {
			return fmt.Errorf("redistest: PTTL %s: %w", k, err)
		}
		if left == -1 && !may[k] && !strings.HasSuffix(k, protocol.MarkKey("")) { // -1: no expiry; -2: gone meanwhile, which is fine
			leaked = append(leaked, k)
		}
	}
	if leaked != nil {
		return fmt.Errorf("redistest: keys without expiry left behind: %q", leaked)
	}
	return nil
}
