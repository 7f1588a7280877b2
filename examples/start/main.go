package main

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/redis/go-redis/v9"
)

func main() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb) // one for the whole process
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // for the wait and the work
	err = locks.Mutex("invoice:42").Do(ctx, func(ctx context.Context) error {
		log.Print("no other process is in here") // ctx ends if the lock is lost, too
		return nil
	})
	cancel()
	if err = errors.Join(err, locks.Close(), rdb.Close()); err != nil {
		log.Fatal(err)
	}
}
