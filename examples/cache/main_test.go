package main

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/examples/internal/testclient"
)

func TestFiftyCallersOfFiveProcessesLoadOnce(t *testing.T) {
	_, rdb := testclient.Redis(t)
	var loads atomic.Int64
	var processes []*cache
	for range 5 {
		processes = append(processes, counting(testclient.Process(t, rdb).RWMutex("catalogue"), rdb, &loads))
	}
	for round := int64(1); round <= 3; round++ {
		rdb.Del(t.Context(), pearsKey, plumsKey) // as if they had expired
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				if _, err := processes[i%5].get(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := loads.Load(); n != round {
			t.Errorf("the source was asked %d times, want %d", n, round)
		}
	}
}

// Each refill makes both numbers one greater, so a reader of two different numbers has
// read half of a refill.
func TestNobodyReadsHalfARefill(t *testing.T) {
	_, rdb := testclient.Redis(t)
	var loads atomic.Int64
	c := counting(testclient.Process(t, rdb).RWMutex("catalogue"), rdb, &loads)
	var all sync.WaitGroup
	for range 4 {
		reader := counting(testclient.Process(t, rdb).RWMutex("catalogue"), rdb, &loads)
		all.Go(func() {
			for range 100 {
				if found, err := reader.get(t.Context()); err != nil || found.pears != found.plums {
					t.Errorf("got %v, %v", found, err)
				}
			}
		})
	}
	for range 100 {
		if err := c.refresh(t.Context()); err != nil {
			t.Error(err)
		}
	}
	all.Wait()
}

// breaks is a hook that loses every second SET, as if the process had died before it.
type breaks struct{ n atomic.Int64 }

func (*breaks) DialHook(next redis.DialHook) redis.DialHook { return next }
func (*breaks) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (b *breaks) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "set" && b.n.Add(1)%2 == 0 {
			cmd.SetErr(io.EOF)
			return io.EOF
		}
		return next(ctx, cmd)
	}
}

func TestNobodyReadsHalfOfARefillThatWasCutOff(t *testing.T) {
	server, rdb := testclient.Redis(t)
	var loads atomic.Int64
	dying := redis.NewClient(&redis.Options{Addr: server.Addr})
	defer dying.Close()
	dying.AddHook(&breaks{})
	c := counting(testclient.Process(t, rdb).RWMutex("catalogue"), rdb, &loads)
	if err := c.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = counting(testclient.Process(t, rdb).RWMutex("catalogue"), dying, &loads).refresh(t.Context()) // it may fail
	if found, err := c.get(t.Context()); err != nil || found.pears != found.plums {
		t.Errorf("got %v, %v", found, err)
	}
}

// counting returns a cache whose source returns the number of the load, twice.
func counting(lock *leased.RWMutex, rdb *redis.Client, loads *atomic.Int64) *cache {
	return &cache{lock: lock, rdb: rdb, lasts: time.Minute, load: func(context.Context) (catalogue, error) {
		n := int(loads.Add(1))
		return catalogue{n, n}, nil
	}}
}

func TestARefillThatFailsIsTriedByTheNextCaller(t *testing.T) {
	_, rdb := testclient.Redis(t)
	broken := errors.New("broken")
	times := 0
	c := &cache{lock: testclient.Process(t, rdb).RWMutex("catalogue"), rdb: rdb, lasts: time.Minute,
		load: func(context.Context) (catalogue, error) {
			if times++; times == 1 {
				return catalogue{}, broken
			}
			return catalogue{3, 4}, nil
		}}
	if _, err := c.get(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if found, err := c.get(t.Context()); err != nil || (found != catalogue{3, 4}) {
		t.Errorf("got %v, %v", found, err)
	}
}

func TestTheProgramRuns(t *testing.T) {
	server, _ := testclient.Redis(t)
	if err := run(t.Context(), server.Addr); err != nil {
		t.Error(err)
	}
}
