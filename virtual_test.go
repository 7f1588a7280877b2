package leased_test

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// Hours of leases in milliseconds: the whole client on an embedded server, where
// time passes only while everybody waits, so that instants and counts are exact.

func TestVirtualALeaseOfThreeHoursIsRenewedEachThirdOfItsTTLAndNeverLost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(30*time.Second))
		began := time.Now()
		l := lock(t, c.Mutex("x"))
		work := l.Context()
		for range 1080 {
			time.Sleep(10*time.Second - time.Millisecond)
			before := c.Stats().Renewals
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if n := c.Stats().Renewals; n != before+1 || n != int64(time.Since(began)/(10*time.Second)) {
				t.Fatalf("%d renewals %v after the beginning, %d a moment before", n, time.Since(began), before)
			}
			if left := time.Until(l.TrustedUntil()); left != 30*time.Second-302*time.Millisecond {
				t.Fatalf("trusted for %v after a renewal", left)
			}
		}
		if work.Err() != nil || c.Stats().Lost != 0 {
			t.Errorf("lost: %v", context.Cause(work))
		}
		unlock(t, l)
	})
}

func TestVirtualAThousandLeasesOfMixedTTLsAreRenewedTogetherAndInTime(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var sent stamps
		c := clientOn(t, s, s.connect(t, onRoomyLines, func(o *redis.Options) { o.Limiter = &sent }))
		ttls := []time.Duration{3 * time.Second, 10 * time.Second, 30 * time.Second, time.Hour}
		var held []*leased.Lease
		for i := range 1000 {
			held = append(held, lock(t, c.Mutex("x"+strconv.Itoa(i), leased.WithTTL(ttls[i%4]))))
		}
		before, trips := c.Stats(), len(sent.all())
		time.Sleep(30*time.Second + time.Millisecond)
		synctest.Wait()
		if n := c.Stats().Renewals - before.Renewals; n != 250*(30+9+3) {
			t.Errorf("%d renewals", n)
		}
		// 30 + 9 instants, and three at which another 250 are due; a few more for
		// the script that the server did not know and for further connections.
		if n := len(sent.all()) - trips; n < 30+9+3 || n > 50 {
			t.Errorf("%d round trips", n)
		}
		for _, l := range held {
			if l.Context().Err() != nil {
				t.Fatal(context.Cause(l.Context()))
			}
			unlock(t, l)
		}
		if n := c.Stats().Lost; n != 0 {
			t.Errorf("%d lost", n)
		}
	})
}

func TestVirtualALeaseEndsWithItsTrustWhileRedisLoads(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 30 * time.Second
		l := lock(t, newClient(t, s, leased.WithTTL(ttl)).Mutex("x"))
		began := time.Now()
		work := l.Context()
		time.Sleep(25 * time.Second)
		s.Mini.SetError("LOADING Redis is loading the dataset in memory")
		<-work.Done()
		// Confirmed last by the renewal sent after 20 s.
		if took := time.Since(began); took != 20*time.Second+ttl-ttl/100-2*time.Millisecond {
			t.Errorf("ended after %v", took)
		}
		isAll(t, context.Cause(work), leased.ErrLeaseLost)
		s.Mini.SetError("")
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
	})
}

func TestVirtualAReleaseWakesTheNextProcessAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		waits := newClient(t, s)
		l := lock(t, newClient(t, s).Mutex("x"))
		for range 20 {
			waiter := locking(t, waits.Mutex("x"))
			time.Sleep(time.Minute)
			began := time.Now()
			unlock(t, l)
			l = <-waiter
			if d := time.Since(began); d != 0 {
				t.Errorf("entered after %v", d)
			}
			waits = newClient(t, s)
		}
		unlock(t, l)
	})
}

func TestVirtualAWaiterEntersWhenAVanishedOwnersTTLEnds(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const ttl = 47 * time.Second
		s.rdb.Set(context.Background(), "x", "leased1:w:47000:c:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:gone", ttl)
		began := time.Now()
		unlock(t, lock(t, newClient(t, s).Mutex("x")))
		if d := time.Since(began) - ttl; d <= 0 || d > time.Millisecond {
			t.Errorf("entered %v after the end of the TTL", d)
		}
	})
}

func TestVirtualAnInboxThatRejoinsHasItsWaitersLookAgainAtOnce(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		l := lock(t, newClient(t, s).Mutex("x"))
		c, wire := onLine(t, s)
		waiter := locking(t, c.Mutex("x"))
		time.Sleep(time.Minute)
		began := time.Now()
		wire.cut()
		synctest.Wait()
		unlock(t, l) // nobody hears of it
		wire.mend()
		unlock(t, <-waiter)
		if d := time.Since(began); d > 100*time.Millisecond { // the pace alone has it look after 2 to 3 s
			t.Errorf("looked again after %v", d)
		}
	})
}

func TestVirtualAHalfOpenInboxIsNoticedASecondAfterARecheckAndRebuilt(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var lines wards
		var out logs
		l := lock(t, newClient(t, s).Mutex("x"))
		waiter := locking(t, clientOn(t, s, s.connect(t, lines.change), out.option()).Mutex("x"))
		time.Sleep(time.Hour)
		if n := len(out.messages()); n != 0 {
			t.Errorf("an hour of echoes made it say %q", out.messages())
		}
		lines.frozen.Add(1)
		// A re-check within 3 s, its echo within 1 s, another subscription 20 ms later.
		time.Sleep(4*time.Second + 20*time.Millisecond)
		synctest.Wait()
		if n := out.count(slog.LevelWarn, "does not hear"); n != 1 {
			t.Errorf("it says %q", out.messages())
		}
		began := time.Now()
		unlock(t, l)
		unlock(t, <-waiter)
		if d := time.Since(began); d != 0 {
			t.Errorf("the new inbox heard of the release after %v", d)
		}
	})
}

func TestVirtualAHundredWaitingClientsLookAtTheirPace(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		const clients, span = 100, time.Minute
		l := lock(t, newClient(t, s).Mutex("x"))
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		looks := make([]stamps, clients)
		for i := range looks {
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &looks[i] }))
			all.Go(func() {
				_, err := c.Mutex("x").LockContext(ctx)
				isAll(t, err, context.Canceled)
			})
		}
		began := time.Now()
		time.Sleep(span)
		synctest.Wait()
		for i := range looks {
			times := looks[i].all()
			last := began // all that is asked in the beginning is asked then
			n := 0
			for _, at := range times {
				if at.Equal(began) {
					continue
				}
				if pause := at.Sub(last); pause < 2*time.Second || pause > 3*time.Second {
					t.Errorf("client %d looked after %v", i, pause)
				}
				last = at
				n++
			}
			if most := int(span/time.Second) / 2; n > most || n < int(span/time.Second)/3 {
				t.Errorf("client %d sent %d commands in %v", i, n, span)
			}
		}
		cancel()
		all.Wait()
		unlock(t, l)
	})
}

func TestVirtualLockBacksOffUpTo30sAndSaysSoOnceAMinute(t *testing.T) {
	for text, want := range map[string]struct {
		level       slog.Level
		long, after time.Duration // how long pauses become, and the last
	}{
		"NOAUTH Authentication required.":                {slog.LevelError, 10 * time.Second, 30 * time.Second},
		"LOADING Redis is loading the dataset in memory": {slog.LevelWarn, 2 * time.Second, 2 * time.Second},
	} {
		inVirtualTime(t, func(t *testing.T, s place) {
			var sent stamps
			var out logs
			c := clientOn(t, s, s.connect(t, func(o *redis.Options) { o.Limiter = &sent }), out.option())
			unlock(t, lock(t, c.Mutex("other"))) // it was well once
			time.Sleep(time.Second)              // and the inbox subscribed, whose attempts count too
			before := len(sent.all())
			s.Mini.SetError(text)
			in := make(chan struct{})
			go func() {
				c.Mutex("x").Lock()
				close(in)
			}()
			time.Sleep(time.Hour)
			synctest.Wait()
			times := sent.all()[before:]
			for i := 1; i < len(times); i++ {
				pause := times[i].Sub(times[i-1])
				if pause > want.after {
					t.Errorf("%.7s: pause %d is %v", text, i, pause)
					break
				}
				if i > 30 && pause < want.long {
					t.Errorf("%.7s: pause %d is still %v", text, i, pause)
					break
				}
			}
			if len(times) < 120 {
				t.Errorf("%.7s: tried %d times in an hour", text, len(times))
			}
			if n := out.count(want.level, "lock commands"); n < 30 || n > 61 { // at both ends of the hour
				t.Errorf("%.7s: said so %d times in an hour", text, n)
			}
			s.Mini.SetError("")
			mended := time.Now()
			<-in
			if d := time.Since(mended); d > want.after {
				t.Errorf("%.7s: entered %v after it was mended", text, d)
			}
			c.Mutex("x").Unlock()
		})
	}
}

func TestVirtualTheLastTokenIsKeptAliveEachQuarterOfItsLife(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithTTL(30*time.Second))
		l := lock(t, c.Mutex("x"))
		time.Sleep(time.Minute + time.Millisecond)
		synctest.Wait()
		before := c.Stats().Commands
		_, _, _, meta := s.helperKeys("x")
		const life = 10 * time.Minute
		for range 2 * 360 {
			time.Sleep(10 * time.Second)
			if left := s.rdb.PTTL(context.Background(), meta).Val(); left < life*3/4-10*time.Second || left > life {
				t.Fatalf("the token lives on for %v", left)
			}
		}
		synctest.Wait()
		// A renewal each 10 s, a touch each 150 s, an echo each 20 or 30 s.
		if n := c.Stats().Commands - before; n < 720+48+240 || n > 720+48+360 {
			t.Errorf("%d commands in two hours", n)
		}
		unlock(t, l)
	})
}

func TestVirtualCloseWaitsFiveSecondsForHoldersAndNotLonger(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		c, err := leased.New(s.connect(t), leased.WithLogger(slog.New(slog.DiscardHandler)), leased.WithTTL(6*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		l := lock(t, c.Mutex("x"))
		began := time.Now()
		isAll(t, c.Close(), leased.ErrClosed)
		if d := time.Since(began); d != 5*time.Second {
			t.Errorf("waited %v", d)
		}
		// Renewed until then, and not released: another may not enter before the
		// last renewal's TTL ends.
		if left := s.rdb.PTTL(context.Background(), "x").Val(); left < 4*time.Second || left > 6*time.Second {
			t.Errorf("its TTL goes on for %v", left)
		}
		if n := c.Stats().Renewals; n != 2 {
			t.Errorf("renewed %d times while Close waited", n)
		}
		if c.Stats().Lost != 0 {
			t.Error("the lease was taken for lost")
		}
		_ = l.Unlock()
	})
}
