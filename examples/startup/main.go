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
// before the new version was stored, and two instances run it at once if the first of them
// has lost the lock and does not know that yet. So it must be safe to run it twice, also at
// the same time.
type step func(ctx context.Context) error

// steps are those of this release: steps[n] leads from version n to n+1.
var steps = []step{
	func(context.Context) error { fmt.Println("creating the table of orders"); return nil },
	func(context.Context) error { fmt.Println("adding the column of totals"); return nil },
}

// migrate returns when the schema is up to date, whichever instance did it. An instance that
// loses the lock begins again, and most likely finds that another one has done the work.
func migrate(ctx context.Context, locks *leased.Client, db database, steps []step) error {
	for {
		err := locks.Mutex("app:schema-lock").Do(ctx, func(ctx context.Context) error {
			version, err := db.version(ctx) // read under the lock: another instance may have been here
			for err == nil && version < len(steps) {
				if err := steps[version](ctx); err != nil {
					return fmt.Errorf("schema version %d: %w", version+1, err)
				}
				version, err = db.advance(ctx, version)
			}
			return err
		})
		if !errors.Is(err, leased.ErrLeaseLost) {
			return err
		}
	}
}

// database stands for the one whose schema is changed. It keeps the version beside the data.
type database struct{ rdb *redis.Client }

const schemaKey = "app:schema"

func (db database) version(ctx context.Context) (int, error) {
	n, err := db.rdb.Get(ctx, schemaKey).Int()
	if errors.Is(err, redis.Nil) {
		return 0, nil
	}
	return n, err
}

// advance stores the next version if the present one is still what was read, and returns the
// version that is stored then: a greater one if another instance was faster. So the version
// needs no fencing token. The steps are not protected by this: see step.
func (db database) advance(ctx context.Context, from int) (version int, err error) {
	return advanceScript.Run(ctx, db.rdb, []string{schemaKey}, from).Int()
}

var advanceScript = redis.NewScript(`
	local version = tonumber(redis.call('GET', KEYS[1]) or '0')
	if version == tonumber(ARGV[1]) then
		version = version + 1
		redis.call('SET', KEYS[1], version)
	end
	return version`)
