// Command coupon gives out coupon codes, each to one user. A partner has to activate a code
// before it is given, which takes time, so a lock keeps two users from the same code. A
// buyer does not queue: it tries five times and then says "busy". If the lock is lost
// before the code was given, what was done is rolled back.
//
//	go run ./coupon -redis localhost:6379
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func main() {
	address := flag.String("redis", "localhost:6379", "`address` of Redis; the keys of {coupon} are replaced")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		log.Fatal(err)
	}
}

// run lets 30 users grab 10 coupons.
func run(ctx context.Context, address string) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb)
	if err != nil {
		return err
	}
	s := &shop{locks: locks, rdb: rdb, partner: &slowPartner{}, pause: shortPause}
	var codes []string
	for i := range 10 {
		codes = append(codes, fmt.Sprintf("CODE-%02d", i))
	}
	if err := s.open(ctx, codes); err != nil {
		return err
	}
	var all sync.WaitGroup
	for i := range 30 {
		all.Go(func() {
			user := fmt.Sprintf("user-%02d", i)
			code, err := s.grab(ctx, user)
			fmt.Println(user, code, err)
		})
	}
	all.Wait()
	return errors.Join(locks.Close(), rdb.Close())
}

// slowPartner takes 10 ms to activate a code.
type slowPartner struct{}

func (slowPartner) Activate(ctx context.Context, _, _ string, _ uint64) error {
	select {
	case <-time.After(10 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (slowPartner) Deactivate(context.Context, string, string, uint64) error { return nil }

func shortPause() time.Duration { return 20*time.Millisecond + rand.N(60*time.Millisecond) }
