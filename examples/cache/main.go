// Command cache keeps a catalog in Redis that is slow to compute. When it has expired,
// one caller of one process computes it anew, and all others wait for that one, instead of
// all of them storming the source. The catalog has several keys, which a refill writes in
// one transaction: nobody reads half of it, even if its writer dies or loses the lock on the way.
//
//	go run ./cache -redis localhost:6379
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func main() {
	address := flag.String("redis", "localhost:6379", "`address` of Redis, which also holds the cache")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		log.Fatal(err)
	}
}

// run has 100 callers read at once.
func run(ctx context.Context, address string) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb)
	if err != nil {
		return err
	}
	var loads atomic.Int64
	c := &cache{lock: locks.RWMutex("catalog"), rdb: rdb, lasts: 10 * time.Second, load: func(context.Context) (catalog, error) {
		time.Sleep(100 * time.Millisecond) // the slow source
		return catalog{pears: int(loads.Add(1)), plums: 2}, nil
	}}
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			if _, err := c.get(ctx); err != nil {
				log.Print(err)
			}
		})
	}
	all.Wait()
	fmt.Println("100 callers, and the source was asked", loads.Load(), "times")
	return errors.Join(locks.Close(), rdb.Close())
}

// catalog is what is cached, in one key each.
type catalog struct{ pears, plums int }

type cache struct {
	lock  *leased.RWMutex
	rdb   *redis.Client
	lasts time.Duration
	load  func(context.Context) (catalog, error)
}

const (
	pearsKey = "{catalog}:pears"
	plumsKey = "{catalog}:plums"
)

var errMiss = errors.New("not in the cache")

// get returns the catalog from the cache, and fills that first if it has expired.
func (c *cache) get(ctx context.Context) (found catalog, err error) {
	err = c.lock.RDo(ctx, func(ctx context.Context) error {
		found, err = c.read(ctx)
		return err
	})
	if !errors.Is(err, errMiss) {
		return found, err
	}
	return c.refill(ctx)
}

// refill returns the catalog after this caller, or the one before it in the queue, has
// filled the cache.
func (c *cache) refill(ctx context.Context) (found catalog, err error) {
	err = c.lock.Do(ctx, func(ctx context.Context) error {
		if found, err = c.read(ctx); !errors.Is(err, errMiss) {
			return err // somebody else has filled it while this caller waited
		}
		found, err = c.fill(ctx)
		return err
	})
	return found, err
}

// refresh fills the cache although it has not expired, as when a price has changed.
func (c *cache) refresh(ctx context.Context) error {
	return c.lock.Do(ctx, func(ctx context.Context) error {
		_, err := c.fill(ctx)
		return err
	})
}

func (c *cache) fill(ctx context.Context) (catalog, error) {
	found, err := c.load(ctx)
	if err != nil {
		return found, err
	}
	_, err = c.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Set(ctx, pearsKey, found.pears, c.lasts)
		p.Set(ctx, plumsKey, found.plums, c.lasts)
		return nil
	})
	return found, err
}

func (c *cache) read(ctx context.Context) (catalog, error) {
	values, err := c.rdb.MGet(ctx, pearsKey, plumsKey).Result()
	if err != nil {
		return catalog{}, err
	}
	pears, ok1 := values[0].(string)
	plums, ok2 := values[1].(string)
	if !ok1 || !ok2 {
		return catalog{}, errMiss
	}
	p, err1 := strconv.Atoi(pears)
	q, err2 := strconv.Atoi(plums)
	return catalog{pears: p, plums: q}, errors.Join(err1, err2)
}
