package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/measure/figures"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// grants measures for how long a client that takes, renews and gives back a hundred thousand locks
// keeps the server from all other clients, and how evenly its renewals come; and for how long a
// client does so that gives up waiting for ten thousand locks.
//
// The server serves nobody else while it carries out what it has read of a pipeline at once: a
// batch, or the first 16 KB of it, because Redis reads no more at once. So the processor time of a
// batch is measured. SLOWLOG and the latency statistics are about single commands, by the clock,
// which goes on while the system has the server wait for a processor. So the number of times that
// the system took the processor away is printed as well: a command is so short that it hardly ever
// loses it twice. The waits of a prober show the same, but it shares processors with the client.
func grants(b *bench) error {
	ctx := context.Background()
	locks, window := b.pick(100_000, 10_000), time.Duration(b.pick(20, 10))*time.Second
	const (
		workers = 64
		bucket  = 100 * time.Millisecond
	)
	rdb := b.server.Client(func(o *redis.Options) { o.ReadTimeout = time.Minute })
	if err := rdb.ConfigSet(ctx, "slowlog-log-slower-than", fmt.Sprint(blocked.Microseconds())).Err(); err != nil {
		return err
	}
	if err := rdb.ConfigSet(ctx, "slowlog-max-len", "10000").Err(); err != nil {
		return err
	}
	phase := func(what string, batch int, do func() error) error { return keeps(ctx, b, rdb, what, batch, do) }
	if err := giveUps(ctx, b, rdb, b.pick(10_000, 1000), phase); err != nil {
		return err
	}
	c, err := b.client(leased.WithLossHandler(func(leased.LossEvent) {}))
	if err != nil {
		return err
	}
	defer shut(c)
	each := func(do func(i int) error) error { return byWorkers(workers, locks, do) }

	held := make([]*leased.Lease, locks)
	if err := phase(fmt.Sprintf("%d locks are taken by %d goroutines", locks, workers), together, func() error {
		return each(func(i int) (err error) {
			held[i], err = c.Mutex(fmt.Sprintf("invoice:%08d", i)).LockContext(ctx)
			return err
		})
	}); err != nil {
		return err
	}

	time.Sleep(10 * time.Second) // until the first renewals are over, which come in the rhythm in which the locks were taken
	var buckets []float64
	if err := phase("they are renewed", renewals, func() error {
		before, err := redistest.Calls(ctx, rdb)
		if err != nil {
			return err
		}
		beat := time.NewTicker(bucket)
		defer beat.Stop()
		at := time.Now()
		for range int(window / bucket) {
			<-beat.C
			after, err := redistest.Calls(ctx, rdb)
			if err != nil {
				return err
			}
			now := time.Now() // later than the beat on a busy machine
			buckets = append(buckets, float64(after["evalsha"]-before["evalsha"])*float64(bucket)/float64(now.Sub(at)))
			before, at = after, now
		}
		return nil
	}); err != nil {
		return err
	}
	var sum float64
	for _, n := range buckets {
		sum += n
	}
	if len(buckets) > 0 && sum > 0 {
		mean, most := sum/float64(len(buckets)), slices.Max(buckets)
		b.rows.add("  in 100 ms, mean / most", fmt.Sprintf("%.0f / %.0f", mean, most), "", "")
		b.rows.add("  most / mean", fmt.Sprintf("%.1f", most/mean), "all at once: 100", atMost("3", most <= 3*mean))
	}
	lost := c.Stats().Lost
	b.rows.add("  lost", fmt.Sprint(lost), "", "0: "+mark(lost == 0))
	return phase("they are given back", together, func() error {
		return each(func(i int) error {
			if err := held[i].Unlock(); !errors.Is(err, leased.ErrLeaseLost) { // a lost lease was counted above
				return err
			}
			return nil
		})
	})
}

const (
	blocked = time.Millisecond // for how long the server may be kept from others

	// How many commands leave together at most.
	together = 32 // acquisitions, releases
	renewals = 50

	// How many cancels the server reads at once, of up to 250 that leave together.
	cancels = 44
)

// giveUps has a client wait for n locks at once, and then give up.
func giveUps(ctx context.Context, b *bench, rdb *redis.Client, n int, phase func(string, int, func() error) error) error {
	const calm = time.Hour // a TTL so long that nothing is renewed and nobody looks meanwhile
	owner, err := b.client(leased.WithTTL(calm))
	if err != nil {
		return err
	}
	defer shut(owner)
	waiter, err := b.client(leased.WithTTL(calm))
	if err != nil {
		return err
	}
	defer shut(waiter)
	name := func(i int) string { return fmt.Sprintf("order:%08d", i) }
	held := make([]*leased.Lease, n)
	if err := byWorkers(64, n, func(i int) (err error) {
		held[i], err = owner.Mutex(name(i)).LockContext(ctx)
		return err
	}); err != nil {
		return err
	}
	before, err := redistest.Calls(ctx, rdb)
	if err != nil {
		return err
	}
	waits, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { _, _ = waiter.Mutex(name(i)).LockContext(waits) })
	}
	if err := until(100*time.Millisecond, "not all wait", func() (bool, error) {
		now, err := redistest.Calls(ctx, rdb)
		return now["evalsha"]-before["evalsha"] >= int64(n), err
	}); err != nil {
		return err
	}
	return errors.Join(phase(fmt.Sprintf("%d callers give up at once", n), cancels, func() error {
		before := waiter.Stats().Commands
		giveUp()
		all.Wait()
		return until(time.Millisecond, "not all are canceled", func() (bool, error) { // because the callers do not wait for their cancels
			return waiter.Stats().Commands-before >= int64(n), nil
		})
	}), byWorkers(64, n, func(i int) error { return held[i].Unlock() }))
}

// longest is how long until waits.
const longest = time.Minute

// until asks again and again, with a pause, whether something is done. After too long it returns
// an error that begins with not, so that a measurement ends even if it meets a fault.
func until(pause time.Duration, not string, done func() (bool, error)) error {
	for began := time.Now(); ; time.Sleep(pause) {
		if is, err := done(); is || err != nil {
			return err
		}
		if time.Since(began) >= longest {
			return fmt.Errorf("%s after %v", not, longest)
		}
	}
}

// untilQueued waits until n requests are in the queue of a lock.
func untilQueued(ctx context.Context, rdb *redis.Client, lock string, n int, pause time.Duration) error {
	keys, err := protocol.NewKeys("", lock)
	if err != nil {
		return err
	}
	return until(pause, "not all wait", func() (bool, error) {
		waits, err := rdb.ZCard(ctx, keys.Queue()).Result()
		return waits >= int64(n), err
	})
}

// byWorkers does n things, as many at once as there are workers.
func byWorkers(workers, n int, do func(i int) error) error {
	errs := make([]error, workers)
	var all sync.WaitGroup
	for w := range errs {
		all.Go(func() {
			for i := w; i < n && errs[w] == nil; i += workers {
				errs[w] = do(i)
			}
		})
	}
	all.Wait()
	return cmp.Or(errs...)
}

// keeps measures for how long what do causes keeps the server from other clients, if batch
// commands leave together.
func keeps(ctx context.Context, b *bench, rdb *redis.Client, what string, batch int, do func() error) error {
	if err := errors.Join(rdb.Do(ctx, "SLOWLOG", "RESET").Err(), rdb.ConfigResetStat(ctx).Err()); err != nil {
		return err
	}
	before, err := figures.ProcessorTime(ctx, rdb)
	if err != nil {
		return err
	}
	interrupted := interruptions(ctx, rdb)
	p := probe(ctx, b.server)
	err = do()
	waits := p.end()
	if err != nil {
		return err
	}
	after, err := figures.ProcessorTime(ctx, rdb)
	if err != nil {
		return err
	}
	often := "not known how often interrupted"
	if n := interruptions(ctx, rdb); n >= 0 {
		often = fmt.Sprintf("%d times interrupted", n-interrupted)
	}
	slow, err := slowest(ctx, rdb)
	if err != nil {
		return err
	}
	s, err := spend(ctx, rdb, "evalsha")
	if err != nil {
		return err
	}
	p99, err := percentiles(ctx, rdb)
	if err != nil {
		return err
	}
	mean := (after - before) / time.Duration(max(1, s.calls))
	took := time.Duration(batch) * mean
	b.rows.add(fmt.Sprintf("%s: %d commands take the server's processor", what, batch), short(took), "", atMost("1ms", took <= blocked))
	b.rows.add("  one by the clock, µs", p99, "", "")
	b.rows.add("  commands of more than 1 ms", fmt.Sprintf("%d of %d", len(slow), s.calls), often+", longest "+short(slow.at(1)), "0: "+mark(len(slow) == 0))
	b.rows.add("  a PING each ms", fmt.Sprintf("%v p99.9 %s max %s", waits, short(waits.at(.999)), short(waits.at(1))), "", "")
	return nil
}

// interruptions returns how often the system took its processor away from the server, or -1 if
// that cannot be read.
func interruptions(ctx context.Context, rdb *redis.Client) int {
	info, err := rdb.Info(ctx, "server").Result()
	if err != nil {
		return -1
	}
	for line := range strings.Lines(info) {
		pid, ok := strings.CutPrefix(strings.TrimSpace(line), "process_id:")
		if !ok {
			continue
		}
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil {
			return -1
		}
		for line := range strings.Lines(string(status)) {
			if n, ok := strings.CutPrefix(line, "nonvoluntary_ctxt_switches:"); ok {
				if n, err := strconv.Atoi(strings.TrimSpace(n)); err == nil {
					return n
				}
			}
		}
	}
	return -1
}

// percentiles returns how long evalsha took, by the server's clock.
func percentiles(ctx context.Context, rdb *redis.Client) (string, error) {
	info, err := rdb.Info(ctx, "latencystats").Result()
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(info) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "latency_percentiles_usec_evalsha:"); ok {
			return strings.ReplaceAll(text, ",", " "), nil
		}
	}
	return "", nil
}

// slowest returns the commands that took longer than slowlog-log-slower-than.
func slowest(ctx context.Context, rdb *redis.Client) (took times, err error) {
	logged, err := rdb.SlowLogGet(ctx, -1).Result()
	if err != nil {
		return nil, err
	}
	for _, l := range logged {
		if len(l.Args) > 0 && strings.HasPrefix(strings.ToLower(l.Args[0]), "eval") {
			took = append(took, l.Duration)
		}
	}
	return took, nil
}

// prober sends a server a PING every millisecond.
type prober struct {
	stop  chan struct{}
	ended chan struct{}
	waits times
}

func probe(ctx context.Context, server *redistest.Instance) *prober {
	p := &prober{stop: make(chan struct{}), ended: make(chan struct{})}
	rdb := server.Client(func(o *redis.Options) { o.PoolSize = 1 })
	go func() { // ended by end, which waits for it
		defer close(p.ended)
		beat := time.NewTicker(time.Millisecond)
		defer beat.Stop()
		for {
			select {
			case <-p.stop:
				return
			case <-beat.C:
			}
			began := time.Now()
			if rdb.Ping(ctx).Err() == nil {
				p.waits = append(p.waits, time.Since(began))
			}
		}
	}()
	return p
}

func (p *prober) end() times {
	close(p.stop)
	<-p.ended
	return p.waits
}
