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
)

const (
	module    = "github.com/leasedmutex/leased"
	leakLabel = "leased-test"

	// The pauses between two looks, of which each reads what all goroutines do: they double,
	// or in virtual time thousands of looks would wait for one timer.
	firstLeakPause, longestLeakPause = 2 * time.Millisecond, 100 * time.Millisecond

	// leakWithin is for goroutines that end by themselves: with a command under way,
	// after 2 s. It costs a test that leaks, and no other.
	leakWithin = 15 * time.Second
)

var leakChecks atomic.Int64

// CheckLeaks fails tb at its end when the test left anything behind:
//
//   - a goroutine with a function of this module on its stack,
//   - a key under prefix that never expires, unless named in lasting or the mark of a
//     quorum's server,
//   - a pub/sub channel that starts with prefix and has a subscriber.
//
// What is about to go is given time to.
//
// Cleanups run last first, so the order of calls matters: first rdb, whose cleanup
// closes it, then CheckLeaks, then everything that has to be gone by its end:
//
//	s := redistest.Shared(t)
//	rdb, prefix := s.Client(), redistest.Prefix(t)
//	redistest.CheckLeaks(t, rdb, prefix)
//	client := newLeasedClient(t, ...) // t.Cleanup(client.Close)
//
// The test's goroutine is labelled, goroutines inherit labels, and only those with
// the label are looked at: tests may run in parallel, and what ran before does not
// count. So a goroutine that time.AfterFunc or a cleanup of the runtime started is
// not seen. Where the server does not live until the end, rdb is nil, and
// goroutines alone are looked for.
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

// patiently asks until nothing is found or time is up. No event tells that a
// goroutine has ended or that a server has noticed a closed connection.
func patiently(tb testing.TB, until time.Time, find func() error) {
	tb.Helper()
	for pause := firstLeakPause; ; pause = min(2*pause, longestLeakPause) {
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
		if strings.Contains(stack, label) && strings.Contains(stack, module) &&
			!strings.Contains(stack, "redistest.leakedGoroutines") { // who asks
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
// of a Cluster knows of its own subscribers only, so all masters are asked.
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
		if left == -1 && !may[k] && !strings.HasSuffix(k, "leased:quorum:mark") { // -1 is no expiry; -2, gone meanwhile, is fine
			leaked = append(leaked, k)
		}
	}
	if leaked != nil {
		return fmt.Errorf("redistest: keys without expiry left behind: %q", leaked)
	}
	return nil
}
