package leased_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// Subscriptions that are refused, break again and again, or hear nothing.

// unsubscribable is a way to the server whose middle does not know SUBSCRIBE.
type unsubscribable struct {
	net.Conn
	answer []byte // touched by who writes, then reads
}

func (c *unsubscribable) Write(p []byte) (int, error) {
	if bytes.Contains(bytes.ToLower(p), []byte("\r\nsubscribe\r\n")) {
		c.answer = []byte("-ERR unknown command 'subscribe'\r\n")
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *unsubscribable) Read(p []byte) (int, error) {
	if len(c.answer) > 0 {
		n := copy(p, c.answer)
		c.answer = c.answer[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

func TestVirtualWhereSubscribingIsRefusedWaitersPollAndThatIsLoggedOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t, func(o *redis.Options) {
			direct := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := direct(ctx, network, addr)
				return &unsubscribable{Conn: conn}, err
			}
		}), out.option())
		unlock(t, lock(t, c.Mutex("warm")))
		other := newClient(t, s)
		for range 20 {
			theirs := lock(t, other.Mutex("x"))
			mine := locking(t, c.Mutex("x"))
			time.Sleep(300 * time.Millisecond)
			began := time.Now()
			unlock(t, theirs)
			unlock(t, <-mine)
			if took := time.Since(began); took > 500*time.Millisecond {
				t.Errorf("entered %v after the release", took)
			}
		}
		time.Sleep(time.Hour)
		if n := out.count(slog.LevelWarn, "subscribe"); n != 1 {
			t.Errorf("logged %d times: %q", n, out.messages())
		}
	})
}

// listeners are connections of which those that listen can be cut.
type listeners struct {
	wards
	mu    sync.Mutex // guards conns
	conns []*ward
}

func (l *listeners) change(o *redis.Options) {
	l.wards.change(o)
	inner := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := inner(ctx, network, addr)
		if err == nil {
			l.mu.Lock()
			l.conns = append(l.conns, conn.(*ward))
			l.mu.Unlock()
		}
		return conn, err
	}
}

func (l *listeners) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	rest := l.conns[:0]
	for _, conn := range l.conns {
		if conn.listens.Load() {
			_ = conn.Close()
		} else {
			rest = append(rest, conn)
		}
	}
	l.conns = rest
}

func TestVirtualASubscriptionThatBreaksAllTheTimeCostsFewCommandsAndIsQuickOnceSound(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way listeners
		c := clientOn(t, s, s.connect(t, way.change), leased.WithTTL(time.Minute))
		other := clientOn(t, s, s.connect(t, onRoomyLines), leased.WithTTL(time.Minute))
		const locks = 100
		var theirs, mine []*leased.Lease
		var waiting []<-chan *leased.Lease
		for i := range locks {
			theirs = append(theirs, lock(t, other.Mutex(fmt.Sprint("x", i))))
			waiting = append(waiting, locking(t, c.Mutex(fmt.Sprint("x", i))))
		}
		synctest.Wait()
		before := c.Stats().Commands
		const breaks = 16 * 60
		for range breaks {
			time.Sleep(time.Second / 16)
			way.cut()
		}
		// 100 locks look again once or twice in 3 s anyway.
		if n := (c.Stats().Commands - before) / 60; n > 100 {
			t.Errorf("%d commands a second", n)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		way.cut()
		began := time.Now()
		unlock(t, theirs[0])
		mine = append(mine, <-waiting[0])
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("entered %v after the release, across one break", took)
		}
		for i := 1; i < locks; i++ {
			unlock(t, theirs[i])
			mine = append(mine, <-waiting[i])
		}
		for _, l := range mine {
			unlock(t, l)
		}
	})
}

// A half-open inbox is found out although commands of another lock go on failing.
func TestVirtualErrorsOfAnotherLockDoNotHideAHalfOpenInbox(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var way wards
		rdb := s.connect(t, func(o *redis.Options) {
			way.change(o)
			o.ContextTimeoutEnabled = true
		})
		rdb.AddHook(half{func(args []any) bool { return len(args) > 3 && fmt.Sprint(args[3]) == "lost" }})
		c := clientOn(t, s, rdb, leased.WithBackOff(func() leased.BackOff { return hasty{} }))
		theirs := lock(t, newClient(t, s).Mutex("x"))
		mine := locking(t, c.Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		var failing sync.WaitGroup
		failing.Go(func() { _, _ = c.Mutex("lost").LockContext(ctx) })
		time.Sleep(10 * time.Second)
		way.frozen.Add(1)
		time.Sleep(20 * time.Second)
		began := time.Now()
		unlock(t, theirs)
		unlock(t, <-mine)
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("entered %v after the release: the inbox hears nothing", took)
		}
		cancel()
		failing.Wait()
		time.Sleep(time.Minute)
	})
}

type hasty struct{}

func (hasty) NextBackOff() time.Duration { return 300 * time.Millisecond }
