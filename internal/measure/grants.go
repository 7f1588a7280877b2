package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// grants measures for how long the server is kept from all others by a client that takes, renews
// and gives back a hundred thousand locks, and how evenly the renewals come.
//
// What keeps the server is what it reads of a pipeline at once: a batch, whose processor time tells.
// SLOWLOG and the latency statistics tell of single commands, by the clock, which runs on while the
// system has the server wait for a processor; so do a prober's waits, and it has the same
// processors as the client.
func grants(b *bench) error {
	ctx := context.Background()
	locks, window := b.pick(100_000, 10_000), time.Duration(b.pick(20, 10))*time.Second
	const (
		workers = 64
		batch   = 50 // renewals in a pipeline
		limit   = time.Millisecond
	)
	rdb := b.server.Client(func(o *redis.Options) { o.ReadTimeout = time.Minute })
	c, err := b.client(leased.WithLossHandler(func(leased.LossEvent) {}))
	if err != nil {
		return err
	}
	defer shut(c)
	if err := rdb.ConfigSet(ctx, "slowlog-log-slower-than", fmt.Sprint(limit.Microseconds())).Err(); err != nil {
		return err
	}
	if err := rdb.ConfigSet(ctx, "slowlog-max-len", "10000").Err(); err != nil {
		return err
	}

	phase := func(what string, do func() error) error {
		if err := errors.Join(rdb.Do(ctx, "SLOWLOG", "RESET").Err(), rdb.ConfigResetStat(ctx).Err()); err != nil {
			return err
		}
		before, err := processorTime(ctx, rdb)
		if err != nil {
			return err
		}
		p := probe(ctx, b.server)
		err = do()
		waits := p.end()
		if err != nil {
			return err
		}
		after, err := processorTime(ctx, rdb)
		if err != nil {
			return err
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
		b.rows.add(fmt.Sprintf("%s: %d commands take the server's processor", what, batch), short(batch*mean), "", atMost("1ms", batch*mean <= limit))
		b.rows.add("  one by the clock, µs", p99, "", "")
		b.rows.add("  commands of more than 1 ms", fmt.Sprintf("%d of %d", len(slow), s.calls), "longest "+short(slow.at(1)), "0: "+mark(len(slow) == 0))
		b.rows.add("  a PING each ms", fmt.Sprintf("%v p99.9 %s max %s", waits, short(waits.at(.999)), short(waits.at(1))), "", "")
		return nil
	}
	each := func(do func(i int) error) error {
		errs := make([]error, workers)
		var all sync.WaitGroup
		for w := range errs {
			all.Go(func() {
				for i := w; i < locks && errs[w] == nil; i += workers {
					errs[w] = do(i)
				}
			})
		}
		all.Wait()
		return cmp.Or(errs...)
	}

	held := make([]*leased.Lease, locks)
	if err := phase(fmt.Sprintf("%d locks are taken by %d goroutines", locks, workers), func() error {
		return each(func(i int) (err error) {
			held[i], err = c.Mutex(fmt.Sprintf("invoice:%08d", i)).LockContext(ctx)
			return err
		})
	}); err != nil {
		return err
	}

	time.Sleep(10 * time.Second) // the first renewals, which come as the locks were taken
	var buckets []float64
	if err := phase("they are renewed", func() error {
		before, err := redistest.Calls(ctx, rdb)
		if err != nil {
			return err
		}
		beat := time.NewTicker(100 * time.Millisecond)
		defer beat.Stop()
		for range int(window / (100 * time.Millisecond)) {
			<-beat.C
			after, err := redistest.Calls(ctx, rdb)
			if err != nil {
				return err
			}
			buckets = append(buckets, float64(after["evalsha"]-before["evalsha"]))
			before = after
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
		most := slices.Max(buckets)
		b.rows.add("  in 100 ms, mean / most", fmt.Sprintf("%.0f / %.0f", sum/float64(len(buckets)), most), "", "")
		b.rows.add("  most / mean", fmt.Sprintf("%.1f", most/(sum/float64(len(buckets)))), "all at once: 100", "")
	}
	lost := c.Stats().Lost
	b.rows.add("  lost", fmt.Sprint(lost), "", "0: "+mark(lost == 0))
	return phase("they are given back", func() error {
		return each(func(i int) error {
			if err := held[i].Unlock(); !errors.Is(err, leased.ErrLeaseLost) { // which was counted
				return err
			}
			return nil
		})
	})
}

// percentiles tells what evalsha took, by the server's clock.
func percentiles(ctx context.Context, rdb *redis.Client) (string, error) {
	info, err := rdb.Info(ctx, "latencystats").Result()
	for line := range strings.Lines(info) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "latency_percentiles_usec_evalsha:"); ok {
			return strings.ReplaceAll(text, ",", " "), nil
		}
	}
	return "", err
}

// slowest returns the commands that took longer than slowlog-log-slower-than.
func slowest(ctx context.Context, rdb *redis.Client) (took times, err error) {
	logged, err := rdb.SlowLogGet(ctx, -1).Result()
	for _, l := range logged {
		if len(l.Args) > 0 && strings.HasPrefix(strings.ToLower(l.Args[0]), "eval") {
			took = append(took, l.Duration)
		}
	}
	return took, err
}

// prober asks a server for a sign of life each millisecond.
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
