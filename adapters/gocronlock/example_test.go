package gocronlock_test

import (
	"log"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/gocronlock"
)

func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithKeyPrefix("jobs:"))
	if err != nil {
		log.Panic(err)
	}
	defer client.Close()

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
	defer func() { _ = scheduler.Shutdown() }()
	select {}
}

func ExampleNewElector() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithKeyPrefix("jobs:"))
	if err != nil {
		log.Panic(err)
	}
	defer client.Close()

	elector := gocronlock.NewElector(client.Mutex("leader"))
	defer func() { _ = elector.Resign() }()
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
	defer func() { _ = scheduler.Shutdown() }()
	select {}
}
