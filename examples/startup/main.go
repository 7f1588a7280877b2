// Command startup is a service of which many instances start at once. Before they serve,
// one of them brings the schema of their database up to date; the others wait for that, and
// then find nothing to do.
//
//	go run ./startup -redis localhost:6379
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

func main() {
	address := flag.String("redis", "localhost:6379", "`address` of Redis; it stands for the database too, with the key app:schema")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address string) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb)
	if err != nil {
		return err
	}
	// Whoever watches the start of the service has a limit too.
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := migrate(ctx, locks, database{rdb}, steps); err != nil {
		return errors.Join(err, locks.Close(), rdb.Close())
	}
	fmt.Println("the schema is up to date; serving")
	return errors.Join(locks.Close(), rdb.Close())
}

// step changes the schema from one version to the next. It is repeated if the process dies
// before the new version was stored, so it must be possible to run it twice.
type step func(ctx context.Context) error

// steps are those of this release: steps[n] leads from version n to n+1.
var steps = []step{
	func(context.Context) error { fmt.Println("creating the table of orders"); return nil },
	func(context.Context) error { fmt.Println("adding the column of totals"); return nil },
}

// migrate returns when the schema is up to date, whichever instance did it.
func migrate(ctx context.Context, locks *leased.Client, db database, steps []step) error {
	return locks.Mutex("app:schema-lock").Do(ctx, func(ctx context.Context) error {
		version, err := db.version(ctx) // read under the lock: another instance may have been here
		if err != nil {
			return err
		}
		for ; version < len(steps); version++ {
			if err := steps[version](ctx); err != nil {
				return fmt.Errorf("schema version %d: %w", version+1, err)
			}
			if err := db.advance(ctx, version); err != nil {
				return err
			}
		}
		return nil
	})
}

// database stands for the one whose schema is changed. It keeps the version beside the data.
type database struct{ rdb *redis.Client }

const schemaKey = "app:schema"

var errOvertaken = errors.New("another instance has changed the schema meanwhile")

func (db database) version(ctx context.Context) (int, error) {
	n, err := db.rdb.Get(ctx, schemaKey).Int()
	if errors.Is(err, redis.Nil) {
		return 0, nil
	}
	return n, err
}

// advance stores the next version if the present one is still what was read. So it needs
// no fencing token: an instance that lost the lock is refused.
func (db database) advance(ctx context.Context, from int) error {
	ok, err := advanceScript.Run(ctx, db.rdb, []string{schemaKey}, from).Bool()
	if err == nil && !ok {
		err = errOvertaken
	}
	return err
}

var advanceScript = redis.NewScript(`
	if tonumber(redis.call('GET', KEYS[1]) or '0') ~= tonumber(ARGV[1]) then return 0 end
	redis.call('SET', KEYS[1], ARGV[1] + 1)
	return 1`)
