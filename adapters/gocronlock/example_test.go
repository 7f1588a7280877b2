package gocronlock_test

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/gocronlock"
)

func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	client, err := leased.New(rdb, leased.WithKeyPrefix("jobs:"))
	if err != nil {
		log.Panic(err)
	}

	scheduler, err := gocron.NewScheduler(
		gocron.WithDistributedLocker(gocronlock.New(client, 5*time.Second)))
	if err != nil {
		log.Panic(err)
	}
	_, err = scheduler.NewJob(gocron.CronJob("0 3 * * *", false),
		gocron.NewTask(func() { log.Println("in one process only") }),
		gocron.WithName("nightly"))
	if err != nil {
		log.Panic(err)
	}
	scheduler.Start()

	<-ctx.Done()
	if err := errors.Join(scheduler.Shutdown(), client.Close(), rdb.Close()); err != nil {
		log.Print(err)
	}
}

func ExampleNewElector() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	client, err := leased.New(rdb, leased.WithKeyPrefix("jobs:"))
	if err != nil {
		log.Panic(err)
	}

	elector := gocronlock.NewElector(client.Mutex("leader"))
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedElector(elector))
	if err != nil {
		log.Panic(err)
	}
	_, err = scheduler.NewJob(gocron.CronJob("0 3 * * *", false),
		gocron.NewTask(func() { log.Println("in the leader only") }))
	if err != nil {
		log.Panic(err)
	}
	scheduler.Start()

	<-ctx.Done()
	if err := errors.Join(scheduler.Shutdown(), elector.Resign(), client.Close(), rdb.Close()); err != nil {
		log.Print(err)
	}
}
