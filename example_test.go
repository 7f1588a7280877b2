package leased_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

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

// mustNew returns a client as another process would have.
func mustNew(rdb *redis.Client, opts ...leased.Option) *leased.Client {
	client, err := leased.New(rdb, opts...)
	if err != nil {
		log.Panic(err)
	}
	return client
}

// serve is a process that lives for one invoice.
func serve(ctx context.Context, rdb redis.UniversalClient) error {
	client, err := leased.New(rdb) // one for a process; no I/O yet
	if err != nil {
		return err
	}
	defer client.Close() // leaves rdb open

	lease, err := client.Mutex("invoice:42").LockContext(ctx) // ctx bounds the wait, not the hold
	if err != nil {
		return err // matches leased.ErrNotAcquired, and ctx's error if it ended
	}
	defer lease.Unlock()

	return pay(lease.Context(), lease.Token()) // a context that ends when the lease does
}

func pay(ctx context.Context, token uint64) error {
	if token == 0 {
		return errors.New("no token")
	}
	return ctx.Err()
}

// One process, one client, one lock, and work that ends when the lease does.
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

// The context bounds the wait. The error says both that the lock was not
// acquired, and why.
func ExampleMutex_LockContext() {
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

// TryLockContext does not wait for another. ErrLocked tells a lock that is taken
// from trouble with Redis.
func ExampleMutex_TryLockContext() {
	rdb, stop := embeddedRedis()
	defer stop()
	client, other := mustNew(rdb), mustNew(rdb)
	defer client.Close()
	defer other.Close()
	ctx := context.Background()

	mu := other.Mutex("nightly")
	mu.Lock()
	defer mu.Unlock()

	lease, err := client.Mutex("nightly").TryLockContext(ctx)
	switch {
	case err == nil:
		defer lease.Unlock()
		fmt.Println("tonight it is our turn")
	case errors.Is(err, leased.ErrLocked):
		fmt.Println("another process does it tonight")
	default:
		fmt.Println("trouble:", err)
	}
	// Output: another process does it tonight
}

// Do locks, runs a function, and unlocks. If the lease was lost meanwhile, the
// error says so beside the function's own.
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

// RDo runs a function beside other readers. To write after having read, let go,
// lock for writing, and look again: a reader cannot become a writer.
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
			if pears == 0 { // nobody else did it meanwhile
				pears = 3
			}
			return nil
		})
	}
	fmt.Println(pears, err)
	// Output: 3 <nil>
}

// A writer that goes on as a reader shows others what it wrote, and knows that
// nobody has changed it since.
func ExampleLease_Downgrade() {
	rdb, stop := embeddedRedis()
	defer stop()
	here, there := mustNew(rdb), mustNew(rdb)
	defer here.Close()
	defer there.Close()

	write := func(ctx context.Context, _ uint64) error { return ctx.Err() }
	publish := func(ctx context.Context, _ uint64) error {
		theirs := there.RWMutex("prices")
		fmt.Println("another writer:", theirs.TryLock())
		fmt.Println("another reader:", theirs.TryRLock())
		theirs.RUnlock()
		return ctx.Err()
	}
	renew := func(ctx context.Context, client *leased.Client) error {
		prices := client.RWMutex("prices")
		lease, err := prices.LockContext(ctx)
		if err != nil {
			return err
		}
		defer lease.Unlock()
		if err := write(lease.Context(), lease.Token()); err != nil {
			return err
		}
		if err := lease.Downgrade(ctx); err != nil {
			return err // the lease was lost, or ctx ended first
		}
		return publish(lease.Context(), lease.Token()) // others may read too, nobody writes
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

	// Should the message about it be lost, the next renewal tells: after a third
	// of the TTL.
	mu := client.Mutex("import", leased.WithTTL(600*time.Millisecond))
	lease, err := mu.LockContext(context.Background())
	if err != nil {
		log.Panic(err)
	}
	work := func(ctx context.Context) error {
		<-ctx.Done() // a batch after another, until there are none or ctx ends
		return context.Cause(ctx)
	}

	if err := client.ForceUnlock(context.Background(), "import"); err != nil {
		log.Panic(err)
	}
	fmt.Println(errors.Is(work(lease.Context()), leased.ErrLeaseLost))
	fmt.Println(errors.Is(lease.Unlock(), leased.ErrLeaseLost))
	// Output:
	// true
	// true
}

// The resource compares tokens, and so refuses an owner that lost its lease and
// does not know it yet.
func ExampleLease_Token() {
	rdb, stop := embeddedRedis()
	defer stop()
	slow, next := mustNew(rdb), mustNew(rdb)
	defer slow.Close()
	defer next.Close()
	ctx := context.Background()

	// In SQL, with a column for the token:
	//
	//	UPDATE invoice SET state = $1, token = $2 WHERE id = $3 AND token <= $2
	//
	// No row updated means that the lease is not the latest one.
	var row struct {
		state string
		token uint64
	}
	update := func(state string, token uint64) bool {
		if row.token > token {
			return false
		}
		row.state, row.token = state, token
		return true
	}

	first, err := slow.Mutex("invoice:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	// The first owner is stopped, for longer than its TTL; the lock goes on.
	if err := next.ForceUnlock(ctx, "invoice:42"); err != nil {
		log.Panic(err)
	}
	second, err := next.Mutex("invoice:42").LockContext(ctx)
	if err != nil {
		log.Panic(err)
	}
	defer second.Unlock()

	fmt.Println("second owner:", update("paid", second.Token()))
	fmt.Println("first owner, late:", update("cancelled", first.Token()))
	fmt.Println(row.state)
	_ = first.Unlock() // leased.ErrLeaseLost
	// Output:
	// second owner: true
	// first owner, late: false
	// paid
}

// Users of Lock and Unlock get no errors; the loss handler tells them.
func ExampleWithLossHandler() {
	rdb, stop := embeddedRedis()
	defer stop()
	lost := make(chan leased.LossEvent, 1)
	client := mustNew(rdb,
		leased.WithTTL(600*time.Millisecond),
		leased.WithLossHandler(func(ev leased.LossEvent) { lost <- ev }))
	defer client.Close()

	mu := client.Mutex("leader")
	mu.Lock()
	defer mu.Unlock() // still needed: here, mu is locked until then

	if err := client.ForceUnlock(context.Background(), "leader"); err != nil {
		log.Panic(err)
	}
	ev := <-lost
	fmt.Println("no longer:", ev.Name)
	// Output: no longer: leader
}

// Options of a lock can be the client's default, be kept in a slice for several
// locks, and be overridden by later ones. A bad one is told on first use.
func ExampleLockOption() {
	rdb, stop := embeddedRedis()
	defer stop()
	client := mustNew(rdb, leased.WithKeyPrefix("billing:"), leased.WithTTL(10*time.Second))
	defer client.Close()

	batch := []leased.LockOption{leased.WithTTL(time.Minute), leased.WithMaxHold(time.Hour)}
	ctx := context.Background()
	for _, mu := range []*leased.Mutex{
		client.Mutex("a"),
		client.Mutex("b", batch...),
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
		_ = lease.Unlock()
	}
	// Output:
	// more than 10 s: false
	// more than 10 s: true
	// more than 10 s: true
	// refused: true
}

// Inspect shows who has a lock and who waits, and takes nothing.
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
