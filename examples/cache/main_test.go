package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
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
		processes = append(processes, counting(testclient.Process(t, rdb).RWMutex("catalog"), rdb, &loads))
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
	c := counting(testclient.Process(t, rdb).RWMutex("catalog"), rdb, &loads)
	var all sync.WaitGroup
	for range 4 {
		reader := counting(testclient.Process(t, rdb).RWMutex("catalog"), rdb, &loads)
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

// dies is a hook that sends the beginning of a pipeline, up to its first SET, and then closes the
// connection, as if the process had died there.
type dies struct{ address string }

func (dies) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (dies) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (d dies) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", d.address)
		if err != nil {
			return err
		}
		defer conn.Close()
		replies := bufio.NewReader(conn)
		for _, cmd := range cmds {
			var request strings.Builder
			fmt.Fprintf(&request, "*%d\r\n", len(cmd.Args()))
			for _, arg := range cmd.Args() {
				text := fmt.Sprint(arg)
				fmt.Fprintf(&request, "$%d\r\n%s\r\n", len(text), text)
			}
			if _, err := io.WriteString(conn, request.String()); err != nil {
				return err
			}
			if reply, err := replies.ReadString('\n'); err != nil || !strings.HasPrefix(reply, "+") {
				return fmt.Errorf("the reply to %v is %q: %w", cmd, reply, err)
			}
			if cmd.Name() == "set" {
				return io.ErrUnexpectedEOF
			}
		}
		return errors.New("nothing was set")
	}
}

func TestNobodyReadsHalfOfARefillThatWasCutOff(t *testing.T) {
	server, rdb := testclient.Redis(t)
	var loads atomic.Int64
	dying := redis.NewClient(&redis.Options{Addr: server.Addr})
	defer dying.Close()
	dying.AddHook(dies{server.Addr})
	c := counting(testclient.Process(t, rdb).RWMutex("catalog"), rdb, &loads)
	if err := c.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := counting(testclient.Process(t, rdb).RWMutex("catalog"), dying, &loads).refresh(t.Context())
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("the refill did not die: %v", err)
	}
	if found, err := c.get(t.Context()); err != nil || (found != catalog{1, 1}) {
		t.Errorf("got %v, %v", found, err)
	}
}

// counting returns a cache whose source returns the number of the load, twice.
func counting(lock *leased.RWMutex, rdb *redis.Client, loads *atomic.Int64) *cache {
	return &cache{lock: lock, rdb: rdb, lasts: time.Minute, load: func(context.Context) (catalog, error) {
		n := int(loads.Add(1))
		return catalog{n, n}, nil
	}}
}

func TestARefillThatFailsIsTriedByTheNextCaller(t *testing.T) {
	_, rdb := testclient.Redis(t)
	broken := errors.New("broken")
	times := 0
	c := &cache{lock: testclient.Process(t, rdb).RWMutex("catalog"), rdb: rdb, lasts: time.Minute,
		load: func(context.Context) (catalog, error) {
			if times++; times == 1 {
				return catalog{}, broken
			}
			return catalog{3, 4}, nil
		}}
	if _, err := c.get(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if found, err := c.get(t.Context()); err != nil || (found != catalog{3, 4}) {
		t.Errorf("got %v, %v", found, err)
	}
}

func TestTheProgramRuns(t *testing.T) {
	server, _ := testclient.Redis(t)
	if err := run(t.Context(), server.Addr); err != nil {
		t.Error(err)
	}
}
