package leased_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// Lock names can be secrets.
func TestWithoutLockNamesLogsOfAnUnconfirmedReleaseDoNotNameTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithTTL(10*time.Second), leased.WithoutLockNamesInLogs(), leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		mu := c.Mutex("secret-lock")
		outage := func() { s.Mini.SetError("LOADING Redis is loading the dataset in memory") }
		recover := func() {
			time.Sleep(2 * time.Minute) // the next line of the same cause is due
			s.Mini.SetError("")
			time.Sleep(time.Minute)
			synctest.Wait()
		}

		mu.Lock()
		outage()
		mu.Unlock()
		recover()
		err := mu.Do(context.Background(), func(context.Context) error {
			outage()
			return nil
		})
		if err != nil {
			t.Errorf("Do: %v", err)
		}
		recover()
		if n := strings.Count(text.String(), "not confirmed"); n != 2 || strings.Contains(text.String(), "secret") {
			t.Errorf("two releases were not confirmed; logged %q", text.String())
		}
	})
}

var debugging = &slog.HandlerOptions{Level: slog.LevelDebug}

func TestWithoutLockNamesLogsDoNotNameLocks(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithoutLockNamesInLogs(), leased.WithLogger(slog.New(slog.NewTextHandler(&text, debugging))))
		s.rdb.HSet(context.Background(), "secret-name", "field", "value")
		_, err := c.Mutex("secret-name").LockContext(context.Background())
		isAll(t, err, leased.ErrNotAcquired)
		l, more := lock(t, c.Mutex("secret-lock")), lock(t, c.Mutex("another-secret-lock"))
		s.rdb.Del(context.Background(), "secret-lock", "another-secret-lock")
		<-l.Context().Done()
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		isAll(t, more.Unlock(), leased.ErrLeaseLost)
		time.Sleep(time.Second)
		synctest.Wait()
		if strings.Count(text.String(), "\n") < 3 || strings.Contains(text.String(), "secret") {
			t.Errorf("logged %q", text.String())
		}
		s.rdb.Del(context.Background(), "secret-name")
	})
}

func TestLogsNameTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithTTL(10*time.Second), leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		background := context.Background()
		for _, name := range []string{"hash", "other-hash"} {
			s.rdb.HSet(background, name, "field", "value")
			_, err := c.Mutex(name).LockContext(background)
			isAll(t, err, leased.ErrNotAcquired)
		}
		s.rdb.Set(background, "foreign", "value", 0)
		_, err := c.Mutex("foreign").TryLockContext(background)
		isAll(t, err, leased.ErrLocked)
		l := lock(t, c.Mutex("deleted"))
		s.rdb.Del(background, "deleted")
		<-l.Context().Done()
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		mu := c.Mutex("unconfirmed")
		mu.Lock()
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		mu.Unlock()
		s.Mini.SetError("")
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, want := range []string{
			"level=ERROR msg=\"leased: another program, such as Redisson, keeps another type of value under a lock's name; an operator has to mend that\" lock=hash error=",
			"an operator has to mend that\" lock=other-hash error=",
			"is gone\" lock=foreign\n",
			"level=ERROR msg=\"leased: lease lost before Unlock\" lock=deleted token=",
			"Redis cannot run lock commands now; trying again\" lock=unconfirmed error=",
			"a release was not confirmed; still trying\" lock=unconfirmed error=",
		} {
			if !strings.Contains(text.String(), want) {
				t.Errorf("no line has %s; logged\n%s", want, text.String())
			}
		}
		s.rdb.Del(background, "hash", "other-hash", "foreign")
	})
}

func TestManyLossesAtOnceAreOneLine(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		leases := make([]*leased.Lease, 57)
		for i := range leases {
			leases[i] = lock(t, c.Mutex(fmt.Sprintf("lock-%02d", i)))
		}
		time.Sleep(100 * time.Millisecond) // until the client hears messages
		for i := range leases {
			must(t, c.ForceUnlock(context.Background(), fmt.Sprintf("lock-%02d", i)))
			time.Sleep(100 * time.Microsecond)
		}
		for _, l := range leases {
			<-l.Context().Done()
			isAll(t, l.Unlock(), leased.ErrLeaseLost)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		want := "level=ERROR msg=\"leased: leases lost before Unlock\" leases=57 reason=\"an operator evicted its owner\" " +
			`locks="\"lock-00\", \"lock-01\", \"lock-02\" and 54 more"`
		if strings.Count(text.String(), "\n") != 1 || !strings.Contains(text.String(), want) {
			t.Errorf("logged\n%swant %s", text.String(), want)
		}
	})
}

func TestTheEndOfAnOutageIsLogged(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(44*time.Second + time.Millisecond)
		s.Mini.SetError("")
		unlock(t, closesSoon(t, "it gets in", waiter))
		synctest.Wait()
		if want := "level=INFO msg=\"leased: Redis answers again after 4"; strings.Count(text.String(), want) != 1 {
			t.Errorf("logged\n%s", text.String())
		}
	})
}
