package migratelock_test

import (
	"database/sql"
	"errors"
	"log"
	"os"
	"time"

	"github.com/golang-migrate/migrate/v4"
	pgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/migratelock"
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
	source, err := iofs.New(os.DirFS("migrations"), ".")
	if err != nil {
		log.Panic(err)
	}

	driver, err := pgx.WithInstance(db, &pgx.Config{})
	if err != nil {
		log.Panic(err)
	}
	driver = migratelock.New(driver, client.Mutex("migrations"), 10*time.Second)
	m, err := migrate.NewWithInstance("iofs", source, "shop", driver)
	if err != nil {
		log.Panic(err)
	}
	defer func() { _, _ = m.Close() }() // also driver and db
	if err := m.Up(); err != nil && !errors.Is(err, migrate.ErrNoChange) {
		log.Panic(err)
	}
}
