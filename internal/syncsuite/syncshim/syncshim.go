// Package syncshim looks like package sync to Go's tests of it. Its locks are locks of
// package leased, on the Redis that LEASED_SYNC_ADDR names.
package syncshim

import (
	"crypto/rand"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/leasedmutex/leased"
)

// What the tests take from sync beside its locks.
type (
	Locker    = sync.Locker
	Once      = sync.Once
	WaitGroup = sync.WaitGroup
	Cond      = sync.Cond
)

// NewCond is that of package sync.
func NewCond(l Locker) *Cond { return sync.NewCond(l) }

// Mutex is a lock of its own: its zero value is unlocked, and a copy of an unused one
// is another lock, as with sync.Mutex.
type Mutex struct {
	once sync.Once
	mu   *leased.Mutex
}

func (m *Mutex) get() *leased.Mutex {
	m.once.Do(func() { m.mu = connection().client.Mutex(newName()) })
	return m.mu
}

// Lock locks m.
func (m *Mutex) Lock() { asking(m.get().Lock) }

// TryLock locks m if that needs no waiting, and reports whether it did.
func (m *Mutex) TryLock() bool { return trying(m.get().TryLock) }

// Unlock unlocks m, and panics if it is not locked.
func (m *Mutex) Unlock() { m.get().Unlock() }

// busy is shared by those who ask for a lock, and Close keeps it: a goroutine that a
// test left behind may ask at any time, and a closed client would have it panic. Who
// asks later waits for the end of the process.
var busy sync.RWMutex

func asking(lock func()) {
	busy.RLock()
	defer busy.RUnlock()
	lock()
}

func trying(lock func() bool) bool {
	busy.RLock()
	defer busy.RUnlock()
	return lock()
}

var names atomic.Int64

func newName() string { return fmt.Sprintf("lock-%d", names.Add(1)) }

// link is the process's connection to Redis.
type link struct {
	rdb    *redis.Client
	client *leased.Client
}

var (
	opened     atomic.Bool
	connection = sync.OnceValue(open)
)

// open panics, since a lock's zero value has nobody to return an error to.
func open() link {
	addr := os.Getenv("LEASED_SYNC_ADDR")
	if addr == "" {
		panic("syncshim: LEASED_SYNC_ADDR names no Redis")
	}
	rdb := redis.NewClient(&redis.Options{
		Addr:                     addr,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	// The misuse cases run in processes of their own, on the same server.
	client, err := leased.New(rdb, leased.WithKeyPrefix("sync:"+rand.Text()+":"))
	if err != nil {
		panic(err)
	}
	opened.Store(true)
	return link{rdb, client}
}

// Close closes the client, if a lock was ever used, and reports what it says. No lock
// can be asked for after that.
func Close() error {
	if !opened.Load() {
		return nil
	}
	busy.Lock()
	l := connection()
	err := l.client.Close()
	if closed := l.rdb.Close(); err == nil {
		err = closed
	}
	return err
}
