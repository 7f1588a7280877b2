package leased_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// After a trouble of the server's that has lasted, back-off would have each lock wait
// for up to 30 s more.

// hung is a way to the server on which nothing comes back while it is shut, but for
// what a subscription hears.
type hung struct{ shut atomic.Bool }

type hungConn struct {
	net.Conn
	all     *hung
	listens atomic.Bool
}

func (h *hung) change(o *redis.Options) {
	direct := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if h.shut.Load() {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		conn, err := direct(ctx, network, addr)
		return &hungConn{Conn: conn, all: h}, err
	}
}

func (c *hungConn) Write(p []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n")) {
		c.listens.Store(true)
	}
	if c.all.shut.Load() && !c.listens.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

const outage = 75 * time.Second

func TestVirtualAFreeLockIsEnteredWithin2sOfTheEndOfAnOutage(t *testing.T) {
	for _, trouble := range []string{"OOM command not allowed", "READONLY You can't write against a read only replica.", "NOREPLICAS Not enough good replicas to write.",
		"MASTERDOWN Link with MASTER is down", "CLUSTERDOWN The cluster is down", "LOADING Redis is loading", "BUSY Redis is busy running a script.", "TRYAGAIN Multiple keys request", ""} {
		for _, locks := range []int{1, 100} {
			name := trouble
			if name == "" {
				name = "no answer"
			}
			t.Run(fmt.Sprintf("%.11s/locks=%d", name, locks), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T, s place) {
					var way hung
					c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
						way.change(o)
						o.PoolSize = 200
					}))
					unlock(t, lock(t, c.Mutex("warm")))
					synctest.Wait()
					if trouble == "" {
						way.shut.Store(true)
					} else {
						s.Mini.SetError(trouble)
					}
					var entered sync.WaitGroup
					for i := range locks {
						entered.Go(func() { unlock(t, lock(t, c.Mutex(fmt.Sprint("x", i)))) })
					}
					time.Sleep(outage)
					sent := c.Stats().Commands
					s.Mini.SetError("")
					way.shut.Store(false)
					began := time.Now()
					entered.Wait()
					most := 2 * time.Second
					if trouble == "" {
						most += 2 * time.Second // a command may be waiting for its answer
					}
					if took := time.Since(began); took > most+10*time.Millisecond {
						t.Errorf("entered %v after the end", took)
					}
					if locks == 1 && sent > 60 {
						t.Errorf("%d commands in the outage", sent)
					}
				})
			})
		}
	}
}

// Every 30 s, as its own policy wants it: the rest are the client's.
type leisurely struct{}

func (leisurely) NextBackOff() time.Duration { return 30 * time.Second }

func TestVirtualOneLockOfAClientAsksEvery2sWhetherRedisIsWellAgain(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithBackOff(func() leased.BackOff { return leisurely{} }))
		unlock(t, lock(t, c.Mutex("warm")))
		synctest.Wait()
		s.Mini.SetError("LOADING Redis is loading")
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		const locks = 20
		for i := range locks {
			all.Go(func() { _, _ = c.Mutex(fmt.Sprint("x", i)).LockContext(ctx) })
		}
		synctest.Wait()
		before := c.Stats().Commands
		time.Sleep(29 * time.Second) // nobody asks by itself
		if n := c.Stats().Commands - before; n < 13 || n > 14 {
			t.Errorf("%d probes in 29 s", n)
		}
		cancel()
		all.Wait()
		s.Mini.SetError("")
		time.Sleep(time.Minute)
	})
}

// Whoever probed gives up; the next has to.
func TestVirtualALockProbesInTheStepsOfOneThatGaveUp(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithBackOff(func() leased.BackOff { return leisurely{} }))
		unlock(t, lock(t, c.Mutex("warm")))
		synctest.Wait()
		s.Mini.SetError("LOADING Redis is loading")
		for i := range 5 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i+1)*3*time.Second)
			defer cancel()
			go func() { _, _ = c.Mutex(fmt.Sprint("x", i)).LockContext(ctx) }()
		}
		last := locking(t, c.Mutex("last"))
		time.Sleep(20 * time.Second)
		s.Mini.SetError("")
		began := time.Now()
		unlock(t, <-last)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("entered %v after the end", took)
		}
	})
}

// half is a deployment half of whose locks cannot be reached, as of a Cluster that
// lost a master.
type half struct{ broken func(args []any) bool }

func (h half) DialHook(next redis.DialHook) redis.DialHook                               { return next }
func (h half) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook { return n }
func (h half) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.broken(cmd.Args()) {
			err := redis.ErrPoolTimeout
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

func TestVirtualAClusterThatIsHalfBrokenIsNotAskedByAllAllTheTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var refused atomic.Int64
		rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		rdb.AddHook(half{func(args []any) bool {
			if len(args) < 4 || len(fmt.Sprint(args[3])) < 4 || fmt.Sprint(args[3])[:4] != "lost" {
				return false
			}
			refused.Add(1)
			return true
		}})
		c := clientOn(t, s, rdb)
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		const locks = 100
		for i := range locks {
			all.Go(func() { _, _ = c.Mutex(fmt.Sprint("lost", i)).LockContext(ctx) })
		}
		time.Sleep(time.Minute) // until their pauses are long
		before := refused.Load()
		all.Go(func() { // the other half is well
			for ctx.Err() == nil {
				unlock(t, lock(t, c.Mutex("well")))
				time.Sleep(50 * time.Millisecond)
			}
		})
		const watched = time.Minute
		time.Sleep(watched)
		// Each by its own policy, which pauses for 10 s at least, and one probe a second.
		if n := refused.Load() - before; n > locks*int64(watched/(10*time.Second))+int64(watched/time.Second) {
			t.Errorf("%d commands in %v", n, watched)
		}
		cancel()
		all.Wait()
		time.Sleep(time.Minute)
	})
}
