package gooselock_test

import (
	"context"
	"database/sql"
	"log"
	"os"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/pressly/goose/v3"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/gooselock"
)

func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	client, err := leased.New(rdb)
	if err != nil {
		log.Panic(err)
	}
	defer client.Close()
	db, err := sql.Open("pgx", "postgres://localhost/shop")
	if err != nil {
		log.Panic(err)
	}
	defer db.Close()

	provider, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS("migrations"),
		goose.WithSessionLocker(gooselock.New(client.Mutex("migrations"))))
	if err != nil {
		log.Panic(err)
	}
	if _, err := provider.Up(context.Background()); err != nil {
		log.Panic(err)
	}
}
