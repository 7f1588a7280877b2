package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// The demonstration of fencing. Two owners of one lock exist at once, because the lock's key is
// deleted in the middle of every sale; the demonstration shows what the stock does about it.

// fencing is how the stock treats tokens. Its functions return nil, or errStale for an access that
// the stock refuses.
type fencing struct {
	title string
	read  func(ctx context.Context, s *shelf, token uint64) (int, error)
	write func(ctx context.Context, s *shelf, token uint64, left int) error
}

// shelf is the resource: a hash with the fields stock and token.
type shelf struct {
	rdb redis.UniversalClient
	key string
}

var errStale = errors.New("refused: another lease was here")

// The scripts are those of the README.
var (
	presentToken = redis.NewScriptServerSHA(`
		local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
		if seen >= tonumber(ARGV[1]) then return false end
		redis.call('HSET', KEYS[1], 'token', ARGV[1])
		return redis.call('HGET', KEYS[1], 'stock')`)
	putUnderToken = redis.NewScriptServerSHA(`
		if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
		redis.call('HSET', KEYS[1], 'stock', ARGV[2])
		return 1`)
	// putIfNotOlder is the mistake: it compares tokens only at the write.
	putIfNotOlder = redis.NewScriptServerSHA(`
		local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
		if seen > tonumber(ARGV[1]) then return 0 end
		redis.call('HSET', KEYS[1], 'token', ARGV[1], 'stock', ARGV[2])
		return 1`)
)

func (s *shelf) plainRead(ctx context.Context) (int, error) {
	return s.rdb.HGet(ctx, s.key, "stock").Int()
}

func (s *shelf) put(ctx context.Context, script *redis.Script, token uint64, left int) error {
	switch n, err := script.Run(ctx, s.rdb, []string{s.key}, token, left).Int(); {
	case err != nil:
		return err
	case n == 0:
		return errStale
	}
	return nil
}

var fencings = []fencing{
	{
		"Without tokens",
		func(ctx context.Context, s *shelf, _ uint64) (int, error) { return s.plainRead(ctx) },
		func(ctx context.Context, s *shelf, _ uint64, left int) error {
			return s.rdb.HSet(ctx, s.key, "stock", left).Err()
		},
	},
	{
		"With the token compared at the write only",
		func(ctx context.Context, s *shelf, _ uint64) (int, error) { return s.plainRead(ctx) },
		func(ctx context.Context, s *shelf, token uint64, left int) error {
			return s.put(ctx, putIfNotOlder, token, left)
		},
	},
	{
		"With the token presented at the first access",
		func(ctx context.Context, s *shelf, token uint64) (int, error) {
			n, err := presentToken.Run(ctx, s.rdb, []string{s.key}, token).Int()
			if errors.Is(err, redis.Nil) {
				err = errStale
			}
			return n, err
		},
		func(ctx context.Context, s *shelf, token uint64, left int) error {
			return s.put(ctx, putUnderToken, token, left)
		},
	},
}

// fenceStep is something that happened in a sale: an owner's access to the stock, or what was done
// to the lock.
type fenceStep struct {
	owner   int // 0 or 1; 2 means whoever deletes the lock's key
	verb    string
	value   int // read or written
	token   uint64
	refused bool
}

const (
	verbLocks   = "locks"
	verbReads   = "reads"
	verbWrites  = "writes"
	verbDeletes = "deletes"
)

// fenceSale is the sale of one stock.
type fenceSale struct {
	title  string
	stock  int
	left   int
	sold   int         // writes that were accepted
	stale  int         // accesses that were refused
	sample []fenceStep // of the first pair of sales
}

func (s *fenceSale) tooMany() int { return s.sold - (s.stock - s.left) }

func runFenceDemo(ctx context.Context, std streams, o demoOptions) error {
	screen := newScreen(std.out)
	m, at, place, err := embeddedUnless(o.at)
	if err != nil {
		return err
	}
	if m != nil {
		defer m.Close()
	}
	options, err := at.options()
	if err != nil {
		return err
	}
	screen.line("Two owners sell %s. In the middle of every sale the lock's key", count(o.stock, "piece", "pieces"))
	screen.line("is deleted, so the second owner gets the lock while the first one still works.")
	screen.line("%s", screen.faint("Redis at "+where(options)+place))
	sales, err := sellFenced(ctx, at, o.stock, screen)
	screen.wipe()
	if err != nil {
		return err
	}
	if last := sales[len(sales)-1]; last.tooMany() != 0 {
		return fmt.Errorf("the fencing failed: %d sold too many", last.tooMany())
	}
	return nil
}

// sellFenced sells a stock with each kind of fencing.
func sellFenced(ctx context.Context, at address, stock int, screen *screen) (sales []*fenceSale, err error) {
	prefix := demoPrefix()
	var rdbs [3]redis.UniversalClient // of the two owners, and of whoever deletes the key
	var clients [2]*leased.Client
	for i := range rdbs {
		if rdbs[i], err = at.connectWhole(ctx); err != nil {
			return nil, err
		}
		defer rdbs[i].Close()
	}
	for i := range clients {
		if clients[i], err = newClient(rdbs[i], lockPrefix(prefix)); err != nil {
			return nil, err
		}
		defer clients[i].Close() // by then its leases are unlocked
	}
	defer func() { err = errors.Join(err, deleteKeys(ctx, rdbs[2], keys(prefix))) }()

	for i, kind := range fencings {
		screen.beat(ctx)
		screen.line("")
		screen.line("%s", screen.bold(fmt.Sprintf("%d  %s", i+1, kind.title)))
		s := &fenceSale{title: kind.title, stock: stock}
		goods := &shelf{rdbs[2], stockKey(prefix)}
		if err := rdbs[2].Del(ctx, goods.key).Err(); err != nil {
			return nil, err
		}
		if err := rdbs[2].HSet(ctx, goods.key, "stock", stock).Err(); err != nil {
			return nil, err
		}
		if err := rdbs[2].Expire(ctx, goods.key, keyLife).Err(); err != nil {
			return nil, err
		}
		for s.left = stock; s.left > 0; {
			steps, err := twoOwners(ctx, kind, prefix, clients, rdbs)
			if err != nil {
				return nil, err
			}
			for _, step := range steps {
				switch {
				case step.refused:
					s.stale++
				case step.verb == verbWrites:
					s.sold++
				}
			}
			if s.sample == nil {
				s.sample = steps
				for _, step := range steps {
					screen.line("   %s", step.text(screen))
				}
			}
			before := s.left
			if s.left, err = goods.plainRead(ctx); err != nil {
				return nil, err
			}
			if s.left >= before {
				return nil, fmt.Errorf("nothing was sold: Redis says %d are left, and %d before", s.left, before)
			}
			screen.progress("   %d sold, %d left, %d too many", s.sold, s.left, s.tooMany())
		}
		text := fmt.Sprintf("%d sold from a stock of %d", s.sold, s.stock)
		if n := s.tooMany(); n > 0 {
			screen.line("   %s: %d too many.", screen.bad(text), n)
		} else {
			screen.line("   %s, %d refused, none too many.", screen.good(text), s.stale)
		}
		sales = append(sales, s)
	}
	return sales, nil
}

// twoOwners has both owners sell a piece, the second one while the first one is still selling.
func twoOwners(ctx context.Context, kind fencing, prefix string, clients [2]*leased.Client, rdbs [3]redis.UniversalClient) ([]fenceStep, error) {
	var steps []fenceStep
	var leases [2]*leased.Lease
	var seen [2]int
	var turnedAway [2]bool
	step := func(owner int, verb string, value int, err error) error {
		s := fenceStep{owner: owner, verb: verb, value: value, refused: errors.Is(err, errStale)}
		if owner < 2 {
			s.token = leases[owner].Token()
		}
		steps = append(steps, s)
		if s.refused {
			turnedAway[owner] = true
			return nil
		}
		return err
	}
	for i := range leases {
		lease, err := clients[i].Mutex(lockName).LockContext(ctx)
		if err != nil {
			return nil, err
		}
		// The error of the first owner says that it lost the lease, which is the point of this.
		defer lease.Unlock() //nolint:errcheck // see above
		leases[i] = lease
		if err := step(i, verbLocks, 0, nil); err != nil {
			return nil, err
		}
		seen[i], err = kind.read(ctx, &shelf{rdbs[i], stockKey(prefix)}, lease.Token())
		if err := step(i, verbReads, seen[i], err); err != nil {
			return nil, err
		}
		if i == 0 {
			if err := step(2, verbDeletes, 0, rdbs[2].Del(ctx, lockPrefix(prefix)+lockName).Err()); err != nil {
				return nil, err
			}
		}
	}
	for i := range leases {
		if turnedAway[i] {
			continue
		}
		err := kind.write(ctx, &shelf{rdbs[i], stockKey(prefix)}, leases[i].Token(), seen[i]-1)
		if err := step(i, verbWrites, seen[i]-1, err); err != nil {
			return nil, err
		}
	}
	return steps, nil
}

// text describes the step for people.
func (s fenceStep) text(screen *screen) string {
	who := [...]string{"A", "B"}
	switch s.verb {
	case verbDeletes:
		return screen.faint("the lock's key is deleted; A does not know")
	case verbLocks:
		return fmt.Sprintf("%s locks, token %d", who[s.owner], s.token)
	case verbReads:
		if s.refused {
			return fmt.Sprintf("%s reads: %s", who[s.owner], screen.bad("refused"))
		}
		return fmt.Sprintf("%s reads %d", who[s.owner], s.value)
	}
	if s.refused {
		return fmt.Sprintf("%s writes %d: %s, and starts again later", who[s.owner], s.value, screen.good("refused"))
	}
	return fmt.Sprintf("%s writes %d: accepted, one piece sold", who[s.owner], s.value)
}
