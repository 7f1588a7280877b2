package leased_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"go.opentelemetry.io/otel/attribute"

	"github.com/leasedmutex/leased"
)

// embeddedRedis stands in for redis.NewClient(&redis.Options{Addr: "…"}).
func embeddedRedis() (rdb *redis.Client, stop func()) {
	server := miniredis.NewMiniRedis()
	server.ClockTTL(true) // keys expire as time passes
	if err := server.Start(); err != nil {
		log.Panic(err)
	}
	rdb = redis.NewClient(&redis.Options{
		Addr:                     server.Addr(),
		ContextTimeoutEnabled:    true, // so that hooks see the commands of locks
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	return rdb, func() {
		_ = rdb.Close()
		server.Close()
	}
}

// mustNew returns a client. Each stands for a process.
func mustNew(rdb *redis.Client, opts ...leased.Option) *leased.Client {
	client, err := leased.New(rdb, opts...)
	if err != nil {
		log.Panic(err)
	}
	return client
}

// serve is a process that pays one invoice and ends.
func serve(ctx context.Context, rdb redis.UniversalClient) error {
	locks, err := leased.New(rdb) // one for a process; no I/O yet
	if err != nil {
		return err
	}
	defer locks.Close() // leaves rdb open

	err = locks.Mutex("invoice:42").Do(ctx, func(ctx context.Context) error {
		return pay(ctx)
	})
	if errors.Is(err, leased.ErrLeaseLost) {
		log.Print("another process may have been in here meanwhile")
	}
	return err
}

// Locks on five servers that share nothing go on while any two of them are down.
func ExampleNewQuorum() {
	var addresses []string
	for range 5 {
		rdb, stop := embeddedRedis()
		defer stop()
		addresses = append(addresses, rdb.Options().Addr)
	}
	fmt.Println(payOnQuorum(context.Background(), addresses))
	// Output: <nil>
}

func payOnQuorum(ctx context.Context, addresses []string) error {
	var servers []redis.UniversalClient
	for _, address := range addresses { // of 3, 5 or 7 servers, in the same order in every process
		rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
		defer rdb.Close()
		servers = append(servers, rdb)
	}
	locks, err := leased.NewQuorum(servers, leased.WithQuarantine(time.Minute)) // which is the default
	if err != nil {
		return err
	}
	defer locks.Close()
	return locks.Mutex("invoice:42").Do(ctx, pay)
}

func pay(ctx context.Context) error { return ctx.Err() }

// Leased takes the clients of other deployments, too.
func ExampleNew_deployments() {
	behindSentinel := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName:            "locks",
		SentinelAddrs:         []string{"sentinel-1:26379", "sentinel-2:26379", "sentinel-3:26379"},
		ContextTimeoutEnabled: true,
		ReadTimeout:           2 * time.Second, // with MaxRetries: a Sentinel that hangs is left in time
		MaxRetries:            -1,
	})
	cluster := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs:                 []string{"node-1:6379", "node-2:6379", "node-3:6379"}, // some, to find the others
		ContextTimeoutEnabled: true,
	})
	overTLS := redis.NewClient(&redis.Options{
		Addr:                  "redis.example.com:6380",
		Username:              "app",
		Password:              os.Getenv("REDIS_PASSWORD"),
		TLSConfig:             &tls.Config{ServerName: "redis.example.com", MinVersion: tls.VersionTLS12},
		ContextTimeoutEnabled: true,
	})
	for _, rdb := range []redis.UniversalClient{behindSentinel, cluster, overTLS} {
		locks, err := leased.New(rdb) // no I/O yet
		if err != nil {
			log.Panic(err)
		}
		fmt.Println(errors.Join(locks.Close(), rdb.Close()))
	}
	// Output:
	// <nil>
	// <nil>
	// <nil>
}

// A process has one client. Do is the shortest way to use a lock, and the safest:
// it unlocks when the function returns or panics, and its error says if the lease was
// lost meanwhile.
func Example() {
	rdb, stop := embeddedRedis()
	defer stop()

	fmt.Println(serve(context.Background(), rdb))
	// Output: <nil>
}

// A Mutex goes wherever a sync.Locker goes. Callers of one client exclude each
// other as with sync.Mutex, and those of all other processes too.
func ExampleMutex() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	var mu sync.Locker = client.Mutex("counter")
	n := 0
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			n++
		})
	}
	wg.Wait()
	fmt.Println(n)
	// Output: 100
}

// account is a struct that had a sync.Mutex before.
type account struct {
	mu *leased.Mutex // was: mu sync.Mutex
	id string
}

func newAccount(locks *leased.Client, id string) *account {
	return &account{mu: locks.Mutex("account:" + id), id: id} // one lock for each account
}

// was: a.mu.Lock(), defer a.mu.Unlock(), and the work
func (a *account) deposit(ctx context.Context, amount int) error {
	return a.mu.Do(ctx, func(ctx context.Context) error {
		return save(ctx, a.id, amount)
	})
}

func save(ctx context.Context, _ string, _ int) error { return ctx.Err() }

// A struct with a sync.Mutex gets a pointer, which its constructor sets.
func ExampleMutex_field() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	a := newAccount(client, "42")
	fmt.Println(a.deposit(context.Background(), 100))
	a.mu.Lock()   // still works, but says nothing of a lost lease
	a.mu.Unlock() //nolint:staticcheck // that it comes in is the point
	// Output: <nil>
}

// locksByKey has the methods of an interface whose locks are known by a key.
type locksByKey struct {
	client *leased.Client
	held   sync.Map // leases by key: one that nothing refers to is not renewed
}

func (l *locksByKey) Lock(key string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // for the wait, not for the hold
	defer cancel()
	lease, err := l.client.Mutex("lock:" + key).LockContext(ctx) // there may be data under the key itself
	if err == nil {
		l.held.Store(key, lease)
	}
	return err
}

func (l *locksByKey) Unlock(key string) error {
	lease, held := l.held.LoadAndDelete(key)
	if !held {
		return leased.ErrNotLocked
	}
	return lease.(*leased.Lease).Unlock()
}

// Between the two calls, nobody but the map has the lease.
func ExampleMutex_interfaceByKey() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	locks := &locksByKey{client: client}
	fmt.Println(locks.Lock("a"), locks.Unlock("a"))
	fmt.Println(errors.Is(locks.Unlock("a"), leased.ErrNotLocked))
	fmt.Println(errors.Is(locks.Lock("}{"), leased.ErrInvalidName))
	// Output:
	// <nil> <nil>
	// true
	// true
}

// handle answers 409 if another request has the lock for too long, 400 if no lock can have the
// name, and 503 if Redis is away.
func handle(locks *leased.Client, work func(context.Context) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := "order:" + r.PathValue("id")
		wait, cancel := context.WithTimeout(r.Context(), 3*time.Second) // for the wait, not for the work
		defer cancel()
		lease, err := locks.Mutex(name).LockContext(wait)
		if errors.Is(err, context.DeadlineExceeded) {
			ask, cancel := context.WithTimeout(r.Context(), time.Second)
			defer cancel()
			if info, away := locks.Inspect(ask, name); away == nil && len(info.Owners) > 0 {
				http.Error(w, "another request works on this order", http.StatusConflict)
				return
			}
		}
		if errors.Is(err, leased.ErrInvalidName) {
			http.Error(w, "no order has this id", http.StatusBadRequest)
			return
		}
		if err != nil { // Redis is away or refuses, the lock was free again, or this process shuts down
			http.Error(w, "try again later", http.StatusServiceUnavailable)
			return
		}
		if err := under(r.Context(), lease, work); err != nil {
			log.Printf("%s: %v", name, err)
			http.Error(w, "internal error", http.StatusInternalServerError)
		}
	}
}

func under(ctx context.Context, lease *leased.Lease, work func(context.Context) error) (err error) {
	ctx, stop := lease.With(ctx)
	defer stop()
	defer func() { // also if work panics, which net/http recovers from
		if unlocked := lease.Unlock(); errors.Is(unlocked, leased.ErrLeaseLost) { // after ErrNotReleased alone the work is done
			err = errors.Join(err, unlocked)
		}
	}()
	return work(ctx)
}

// The context bounds the wait, not the hold. Unlock's error is part of the result: it
// may be the only sign that another process was inside.
func ExampleMutex_LockContext() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	write := func(context.Context, uint64) error { return nil }
	report := func(ctx context.Context) (err error) {
		lease, err := client.Mutex("report").LockContext(ctx) // ctx bounds the wait, not the hold
		if err != nil {
			return err // matches leased.ErrNotAcquired, and ctx's error if it ended
		}
		defer func() { err = errors.Join(err, lease.Unlock()) }()

		work, cancel := lease.With(ctx) // ends with the request or with the lease
		defer cancel()
		return write(work, lease.Token())
	}
	fmt.Println(report(context.Background()))
	// Output: <nil>
}

// The error of a wait that ended says both that the lock was not acquired, and why.
func ExampleMutex_LockContext_timeout() {
	rdb, stop := embeddedRedis()
	defer stop()
	here, there := mustNew(rdb), mustNew(rdb, leased.WithOwner("worker-7"))
	defer here.Close()
	defer there.Close()

	mu := there.Mutex("report")
	mu.Lock()
	defer mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := here.Mutex("report").LockContext(ctx)
	fmt.Println(errors.Is(err, leased.ErrNotAcquired))
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output:
	// true
	// true
}

// TryLockContext does not wait for the present owner. ErrLocked means that the lock is
// taken; any other error is a failure.
func ExampleMutex_TryLockContext() {
	rdb, stop := embeddedRedis()
	defer stop()
	client, other := mustNew(rdb), mustNew(rdb)
	defer client.Close()
	defer other.Close()

	mu := other.Mutex("nightly")
	mu.Lock()
	defer mu.Unlock()

	cleanUp := func(context.Context) error { return nil }
	nightly := func(ctx context.Context) (err error) {
		lease, err := client.Mutex("nightly").TryLockContext(ctx)
		if errors.Is(err, leased.ErrLocked) {
			fmt.Println("another process does it tonight")
			return nil
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, lease.Unlock()) }()
		work, cancel := lease.With(ctx) // ends with ctx or with the lease
		defer cancel()
		return cleanUp(work)
	}
	fmt.Println(nightly(context.Background()))
	// Output:
	// another process does it tonight
	// <nil>
}

// lockUnlessDown waits for a lock that is taken, and not for Redis.
func lockUnlessDown(ctx context.Context, mu *leased.Mutex) (*leased.Lease, error) {
	lease, err := mu.TryLockContext(ctx)
	if errors.Is(err, leased.ErrLocked) {
		wait, cancel := context.WithTimeout(ctx, 10*time.Second) // bounds the wait only, not the lease
		defer cancel()
		lease, err = mu.LockContext(wait)
	}
	return lease, err
}

// LockContext waits through an outage of Redis. Whoever wants its error instead tries first.
func ExampleMutex_TryLockContext_unlessDown() {
	rdb, stop := embeddedRedis()
	defer stop()
	client, other := mustNew(rdb), mustNew(rdb)
	defer client.Close()
	defer other.Close()

	taken := other.Mutex("stock")
	taken.Lock()
	time.AfterFunc(50*time.Millisecond, taken.Unlock)
	lease, err := lockUnlessDown(context.Background(), client.Mutex("stock"))
	if err != nil {
		log.Panic(err)
	}
	fmt.Println(lease.Unlock())
	// Output: <nil>
}

var errHangs = errors.New("a step took too long")

// inSteps works under the lock until a step takes longer than limit, or fails.
func inSteps(ctx context.Context, mu *leased.Mutex, limit time.Duration, step func(context.Context) error) (err error) {
	lease, err := mu.LockContext(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lease.Unlock()) }()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	work, cancel := lease.With(ctx)
	defer cancel()
	beat := time.AfterFunc(limit, func() {
		fail(errHangs)
		_ = lease.Unlock() // the deferred Unlock returns the same error
	})
	defer beat.Stop()
	for work.Err() == nil {
		beat.Reset(limit)
		if err := step(work); err != nil {
			return errors.Join(err, context.Cause(work))
		}
	}
	return context.Cause(work)
}

// A lease is renewed while the process lives, even if the work hangs. A timer that the work must keep
// resetting then releases the lock.
func ExampleLease_Unlock_heartbeat() {
	rdb, stop := embeddedRedis()
	defer stop()
	client, other := mustNew(rdb), mustNew(rdb)
	defer client.Close()
	defer other.Close()

	over := make(chan struct{})
	done := make(chan error)
	go func() { // ends with the step that hangs; the receive below waits for it
		done <- inSteps(context.Background(), client.Mutex("scheduler"), 100*time.Millisecond, func(ctx context.Context) error {
			<-ctx.Done() // it hangs, and learns that it has lost the lock
			close(over)
			return nil
		})
	}()
	<-over
	fmt.Println("free again:", other.Mutex("scheduler").Do(context.Background(), pay) == nil)
	fmt.Println(<-done)
	// Output:
	// free again: true
	// a step took too long
}

// Do locks, runs a function, and unlocks. If the lease was lost meanwhile, the
// error matches ErrLeaseLost as well as the function's own error.
func ExampleMutex_Do() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	err := client.Mutex("stock").Do(context.Background(), func(ctx context.Context) error {
		fmt.Println("counting, unless stopped:", ctx.Err() == nil)
		return nil
	})
	if errors.Is(err, leased.ErrLeaseLost) {
		fmt.Println("another may have counted too")
	}
	fmt.Println(err)
	// Output:
	// counting, unless stopped: true
	// <nil>
}

// An RWMutex is held by any number of readers, in any process, or by one writer.
func ExampleRWMutex() {
	rdb, stop := embeddedRedis()
	defer stop()
	here, there := mustNew(rdb), mustNew(rdb)
	defer here.Close()
	defer there.Close()

	rw, theirs := here.RWMutex("prices"), there.RWMutex("prices")
	rw.RLock()
	theirs.RLock()
	fmt.Println("two readers")
	theirs.RUnlock()
	fmt.Println("a writer beside a reader:", theirs.TryLock())
	rw.RUnlock()

	fmt.Println("a writer alone:", theirs.TryLock())
	fmt.Println("a reader beside a writer:", rw.TryRLock())
	theirs.Unlock()
	// Output:
	// two readers
	// a writer beside a reader: false
	// a writer alone: true
	// a reader beside a writer: false
}

// RDo runs a function beside other readers. A reader cannot become a writer: to write
// what depends on what was read, unlock, lock for writing, and read again.
func ExampleRWMutex_RDo() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()
	ctx := context.Background()

	pears := 0
	rw := client.RWMutex("prices")
	missing := false
	err := rw.RDo(ctx, func(context.Context) error {
		missing = pears == 0
		return nil
	})
	if err == nil && missing {
		err = rw.Do(ctx, func(context.Context) error {
			if pears == 0 { // no other writer did it meanwhile
				pears = 3
			}
			return nil
		})
	}
	fmt.Println(pears, err)
	// Output: 3 <nil>
}

// A writer downgrades its lock so that others can read what it wrote, and no other
// writer comes in between. The lease then has a reader's token, which must not be
// stored; see Lease.Token.
func ExampleLease_Downgrade() {
	rdb, stop := embeddedRedis()
	defer stop()
	here, there := mustNew(rdb), mustNew(rdb)
	defer here.Close()
	defer there.Close()

	write := func(ctx context.Context, _ uint64) error { return ctx.Err() }
	publish := func(ctx context.Context) error {
		theirs := there.RWMutex("prices")
		fmt.Println("another writer:", theirs.TryLock())
		fmt.Println("another reader:", theirs.TryRLock())
		theirs.RUnlock()
		return ctx.Err()
	}
	renew := func(ctx context.Context, client *leased.Client) (err error) {
		prices := client.RWMutex("prices")
		lease, err := prices.LockContext(ctx)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, lease.Unlock()) }()
		work, cancel := lease.With(ctx) // ends with ctx or with the lease
		defer cancel()
		if err := write(work, lease.Token()); err != nil {
			return err
		}
		if err := lease.Downgrade(ctx); err != nil {
			return err // the lease was lost, or ctx ended first
		}
		return publish(work) // others may read, none may write
	}
	fmt.Println(renew(context.Background(), here))
	// Output:
	// another writer: false
	// another reader: true
	// <nil>
}

// Work that gets the lease's context stops when the lease is lost. Here an
// operator takes the lock away.
func ExampleLease_Context() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb)
	defer client.Close()

	// If the message about that is lost, the loss is noticed by the next renewal, after a
	// third of the TTL.
	mu := client.Mutex("import", leased.WithTTL(600*time.Millisecond))
	lease, err := mu.LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	work := func(ctx context.Context) error {
		<-ctx.Done() // stands for batches of work, done until ctx ends
		return context.Cause(ctx)
	}

	if _, err := client.ForceUnlock(context.Background(), "import"); err != nil {
		log.Panic(err)
	}
	fmt.Println(errors.Is(work(lease.Context()), leased.ErrLeaseLost))
	fmt.Println(errors.Is(lease.Unlock(), leased.ErrLeaseLost))
	// Output:
	// true
	// true
}

// present is the first access to an item under a lease: it stores the lease's token and
// reads. It returns nil, and stores nothing, if a lease whose token is not smaller was here
// before.
var present = redis.NewScript(`
	local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
	if seen >= tonumber(ARGV[1]) then return false end
	redis.call('HSET', KEYS[1], 'token', ARGV[1])
	return redis.call('HGET', KEYS[1], 'stock')`)

// put writes only if no other lease was here since present. It returns 0 if one was.
var put = redis.NewScript(`
	if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
	redis.call('HSET', KEYS[1], 'stock', ARGV[2])
	return 1`)

// The token is presented at the first access, and the write is made under that token
// only. An owner that lost the lock between its read and its write is refused.
func ExampleLease_Token() {
	rdb, stop := embeddedRedis()
	defer stop()
	slow, next := mustNew(rdb), mustNew(rdb)
	defer slow.Close()
	defer next.Close()
	ctx := context.Background()
	rdb.HSet(ctx, "item:42", "stock", 50) // in practice on another server than the locks

	first, err := slow.Mutex("lock:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	seen, _ := present.Run(ctx, rdb, []string{"item:42"}, first.Token()).Int()

	// The first owner thinks. Meanwhile it loses the lock, and does not know it yet.
	if _, err := next.ForceUnlock(ctx, "lock:42"); err != nil {
		log.Panic(err)
	}
	second, err := next.Mutex("lock:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	sees, _ := present.Run(ctx, rdb, []string{"item:42"}, second.Token()).Int()

	taken, _ := put.Run(ctx, rdb, []string{"item:42"}, first.Token(), seen-1).Int()
	fmt.Println("first owner read", seen, "and its write was taken:", taken == 1)
	taken, _ = put.Run(ctx, rdb, []string{"item:42"}, second.Token(), sees-1).Int()
	fmt.Println("second owner read", sees, "and its write was taken:", taken == 1)
	_, err = present.Run(ctx, rdb, []string{"item:42"}, first.Token()).Int()
	fmt.Println("first owner comes again and is refused:", errors.Is(err, redis.Nil))

	fmt.Println("its Unlock says so too:", errors.Is(first.Unlock(), leased.ErrLeaseLost))
	fmt.Println(second.Unlock())
	// Output:
	// first owner read 50 and its write was taken: false
	// second owner read 50 and its write was taken: true
	// first owner comes again and is refused: true
	// its Unlock says so too: true
	// <nil>
}

// A mistake: the token is compared at the write only. Two owners that have both read 50
// write 49 in the order of their tokens, both writes are accepted, and two pieces are sold
// for one. ExampleLease_Token is the right way.
func ExampleLease_Token_atTheWriteOnly() {
	rdb, stop := embeddedRedis()
	defer stop()
	slow, next := mustNew(rdb), mustNew(rdb)
	defer slow.Close()
	defer next.Close()
	ctx := context.Background()
	rdb.HSet(ctx, "item:42", "stock", 50)
	putOnly := redis.NewScript(`
		local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
		if seen > tonumber(ARGV[1]) then return 0 end
		redis.call('HSET', KEYS[1], 'token', ARGV[1], 'stock', ARGV[2])
		return 1`)

	first, err := slow.Mutex("lock:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	seen, _ := rdb.HGet(ctx, "item:42", "stock").Int() // no token is presented
	if _, err := next.ForceUnlock(ctx, "lock:42"); err != nil {
		log.Panic(err)
	}
	second, err := next.Mutex("lock:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	sees, _ := rdb.HGet(ctx, "item:42", "stock").Int()

	sold, _ := putOnly.Run(ctx, rdb, []string{"item:42"}, first.Token(), seen-1).Int()
	more, _ := putOnly.Run(ctx, rdb, []string{"item:42"}, second.Token(), sees-1).Int()
	fmt.Println(sold+more, "sold,", rdb.HGet(ctx, "item:42", "stock").Val(), "of 50 left")

	// The error of Unlock is the only sign of it.
	fmt.Println(errors.Is(first.Unlock(), leased.ErrLeaseLost), second.Unlock())
	// Output:
	// 2 sold, 49 of 50 left
	// true <nil>
}

// look reads under a reader's token. It is compared with that of the last writer, and
// never stored: the tokens of readers are in no order among each other.
var look = redis.NewScript(`
	local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
	if seen > tonumber(ARGV[1]) then return false end
	return redis.call('HGET', KEYS[1], 'stock')`)

// A reader's token is above that of every earlier writer and below that of every later
// one. So a store compares it with the last writer's, and keeps only writers' tokens.
func ExampleLease_Token_readers() {
	rdb, stop := embeddedRedis()
	defer stop()
	here, there := mustNew(rdb), mustNew(rdb)
	defer here.Close()
	defer there.Close()
	ctx := context.Background()
	read := func(l *leased.Lease) bool {
		return !errors.Is(look.Run(ctx, rdb, []string{"item:42"}, l.Token()).Err(), redis.Nil)
	}

	writer, err := here.RWMutex("lock:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	rdb.HSet(ctx, "item:42", "stock", 50, "token", writer.Token())
	if err := writer.Unlock(); err != nil {
		log.Panic(err)
	}

	var leases []*leased.Lease
	for _, rw := range []*leased.RWMutex{here.RWMutex("lock:42"), there.RWMutex("lock:42"), here.RWMutex("lock:42")} {
		lease, err := rw.RLockContext(ctx)
		if err != nil {
			log.Panic(err)
		}
		leases = append(leases, lease)
	}
	fmt.Println("the third reader has a smaller token than the second:", leases[2].Token() < leases[1].Token())
	fmt.Println("all may read:", read(leases[0]), read(leases[1]), read(leases[2]))

	// The readers lose the lock, and the next writer comes.
	if _, err := here.ForceUnlock(ctx, "lock:42"); err != nil {
		log.Panic(err)
	}
	writer, err = mustNew(rdb).RWMutex("lock:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	rdb.HSet(ctx, "item:42", "stock", 49, "token", writer.Token())
	fmt.Println("then none may:", read(leases[0]), read(leases[1]), read(leases[2]))
	for _, lease := range append(leases, writer) {
		_ = lease.Unlock() // the readers': leased.ErrLeaseLost
	}
	// Output:
	// the third reader has a smaller token than the second: true
	// all may read: true true true
	// then none may: false false false
}

// Users of Lock and Unlock get no errors; the loss handler reports lost leases to them.
func ExampleWithLossHandler() {
	rdb, stop := embeddedRedis()
	defer stop()
	lost := make(chan string, 1)
	stopWork := func(name string) { lost <- name }

	client, err := leased.New(rdb, leased.WithLossHandler(func(ev leased.LossEvent) { stopWork(ev.Name) }))
	if err != nil {
		log.Panic(err)
	}
	defer client.Close()

	mu := client.Mutex("leader")
	mu.Lock()
	defer mu.Unlock() // still needed: here, mu is locked until then

	if _, err := client.ForceUnlock(context.Background(), "leader"); err != nil {
		log.Panic(err)
	}
	fmt.Println("no longer:", <-lost)
	// Output: no longer: leader
}

// A cron job that every machine starts each minute, by its own clock, runs on the first one
// only: the lock is kept for 50 s although the job takes a moment.
func ExampleWithMinHold() {
	rdb, stop := embeddedRedis()
	defer stop()
	a, b := mustNew(rdb), mustNew(rdb) // on two machines
	defer a.Close()
	defer b.Close()

	everyMinute := func(ctx context.Context, client *leased.Client) error {
		lease, err := client.Mutex("cleanup", leased.WithMinHold(50*time.Second)).TryLockContext(ctx)
		if errors.Is(err, leased.ErrLocked) {
			return nil // another machine does it, or has done it in this minute
		}
		if err != nil {
			return err
		}
		fmt.Println("cleaning up")
		return lease.Unlock()
	}
	ctx := context.Background()
	for _, client := range []*leased.Client{a, b, a} {
		if err := everyMinute(ctx, client); err != nil {
			log.Panic(err)
		}
	}
	// Output:
	// cleaning up
}

// Each order has a lock of its own. In metrics all of them are "order", so that they cost
// the backend no more series than one lock; every span and metric says which shard it is of.
func ExampleWithLockLabelInMetrics() {
	rdb, stop := embeddedRedis()
	defer stop()
	kind := func(name string) string {
		label, _, _ := strings.Cut(name, ":")
		return label
	}
	client := mustNew(rdb,
		leased.WithLockLabelInMetrics(kind),
		leased.WithAttributes(attribute.String("shard", "eu-1")))
	defer client.Close()

	if err := client.Mutex("order:42").Do(context.Background(), pay); err != nil {
		log.Panic(err)
	}
	fmt.Println("measured as:", kind("order:42"))
	// Output: measured as: order
}

// Options of a lock can be the client's default, be kept in a slice for several
// locks, and be overridden by later ones. A bad one is reported on first use.
func ExampleLockOption() {
	rdb, stop := embeddedRedis()
	defer stop()
	client, err := leased.New(rdb, leased.WithKeyPrefix("billing:"), leased.WithTTL(10*time.Second))
	if err != nil {
		log.Panic(err)
	}
	defer client.Close()

	batch := []leased.LockOption{leased.WithTTL(time.Minute), leased.WithMaxHold(time.Hour)}
	report := client.Mutex("report", batch...)

	ctx := context.Background()
	for _, mu := range []*leased.Mutex{
		client.Mutex("a"),
		report,
		client.Mutex("c", append(batch, leased.WithMaxHold(0))...),
		client.Mutex("d", leased.WithTTL(time.Nanosecond)),
	} {
		lease, err := mu.LockContext(ctx)
		if err != nil {
			fmt.Println("refused:", errors.Is(err, leased.ErrInvalidOption))
			continue
		}
		rest := time.Until(lease.TrustedUntil())
		fmt.Println("more than 10 s:", rest > 10*time.Second)
		if err := lease.Unlock(); err != nil {
			log.Panic(err)
		}
	}
	// Output:
	// more than 10 s: false
	// more than 10 s: true
	// more than 10 s: true
	// refused: true
}

// Inspect shows who owns a lock and who waits for it, and acquires nothing.
func ExampleClient_Inspect() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithOwner("worker-7"))
	defer client.Close()

	mu := client.Mutex("report")
	mu.Lock()
	defer mu.Unlock()

	info, err := client.Inspect(context.Background(), "report")
	if err != nil {
		log.Panic(err)
	}
	for _, owner := range info.Owners {
		fmt.Println(owner.Client, owner.Shared, owner.Token == info.Token)
	}
	fmt.Println(info.Queue, "waiting")
	// Output:
	// worker-7 false true
	// 0 waiting
}
