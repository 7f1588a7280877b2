package leased

import (
	"bytes"
	"context"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/clocktest"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
)

// slow is a stub server whose renewals take long.
type slow struct {
	stubServer
	takes   time.Duration
	renewed atomic.Int64
}

func (s *slow) Renew(ctx context.Context, batch []protocol.Renewal) {
	s.renewed.Add(int64(len(batch)))
	time.Sleep(s.takes) // of virtual time: what it takes
	s.stubServer.Renew(ctx, batch)
}

// Answers that take just as long as the pause between renewals arrive together
// with the next alarm, before or after it.
func TestVirtualAnswersThatArriveWithTheNextAlarmDoNotCostARenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		c := onStub(t, 0, 0, WithTTL(ttl))
		s := &slow{stubServer: stubServer{client: c}, takes: ttl / 3}
		c.server = s
		l, err := c.Mutex("x").LockContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		const periods = 1000
		time.Sleep(periods*ttl/3 + time.Millisecond)
		synctest.Wait()
		if n := s.renewed.Load(); n != periods {
			t.Errorf("%d renewals in %d periods", n, periods)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// An alarm is late by the sleep; what else the watchdog has to do has it look first. So it does where the
// wall clock was set back: that ends no lease, but no caller enters before a renewal.
func TestTheWatchdogLooksAtAllLocksWithinASecondOfWaking(t *testing.T) {
	now := time.Now()
	w := newWatchdog(&Client{began: now})
	var locks [3]entry
	for i := range locks {
		w.set(&locks[i], now.Add(time.Duration(i+8)*time.Hour))
	}
	another := &inbox{}
	w.set(another, now.Add(time.Hour)) // an echo is not late because the machine slept
	if due := w.take(now, nil); len(due) != 0 {
		t.Fatalf("%d alarms rang", len(due))
	}
	if next := w.plan(now).Time(w.client.began); next.Sub(now) > time.Second {
		t.Errorf("the clocks are compared after %v", next.Sub(now))
	}
	now = clocktest.Asleep(t, now, -time.Millisecond) // as the system does all the time, to adjust the clock
	if due := w.take(now, nil); len(due) != 0 {
		t.Errorf("%d alarms rang because the clock was adjusted", len(due))
	}
	for name, by := range map[string]time.Duration{"a sleep": time.Minute, "the clock was set back": -time.Hour} {
		now = clocktest.Asleep(t, now, by)
		if due := w.take(now, nil); len(due) != len(locks) {
			t.Errorf("%d alarms rang after %s", len(due), name)
		}
		for i := range locks {
			w.set(&locks[i], now.Add(time.Duration(i+8)*time.Hour))
		}
	}
	for i := range locks {
		w.remove(&locks[i].alarm)
	}
	if another.index == 0 || len(w.alarms) != 1 {
		t.Errorf("%d alarms are left", len(w.alarms))
	}
	if w.remove(&another.alarm); w.plan(now) != 0 {
		t.Error("the clocks are compared for nothing")
	}
}

// emptied is a server that owns nothing anymore.
type emptied struct{ *stubServer }

func (emptied) Renew(_ context.Context, batch []protocol.Renewal) {
	for i := range batch {
		batch[i].Outcome = protocol.NotOurs
	}
}

// The release was faster on the server than a renewal that was sent before it.
func TestARenewalThatCrossesAnUnlockIsNotCountedAsLost(t *testing.T) {
	c := onStub(t, 0, 0)
	c.server = emptied{c.server.(*stubServer)}
	mu := c.Mutex("x")
	mu.Lock()
	e := c.lookup("x")
	sent := protocol.Renewal{Owner: e, Keys: &e.keys, Req: e.request(), At: time.Now()}
	mu.Unlock()
	c.renew([]protocol.Renewal{sent})
	if n := c.stats.renewals[renewalLost].Load(); n != 0 {
		t.Errorf("%d renewals counted as lost", n)
	}
}

// batches is a stub server that notes when renewals come, and of which the n-th hangs, or is late.
// Every tenth batch takes longer than the pause between two.
type batches struct {
	stubServer
	hangs int
	late  int
	mu    sync.Mutex
	at    []time.Time
	sizes []int
	now   int // how many are under way
	most  int
}

func (s *batches) Renew(ctx context.Context, batch []protocol.Renewal) {
	s.mu.Lock()
	s.at, s.sizes = append(s.at, time.Now()), append(s.sizes, len(batch))
	s.now++
	s.most = max(s.most, s.now)
	takes := 300 * time.Microsecond
	if len(s.at)%10 == 0 {
		takes = 4 * time.Millisecond
	}
	if len(s.at) == s.hangs {
		takes = 1500 * time.Millisecond
	}
	if len(s.at) == s.late {
		takes = 200 * time.Millisecond
	}
	s.mu.Unlock()
	time.Sleep(takes) // of virtual time: the way to the server
	s.stubServer.Renew(ctx, batch)
	s.mu.Lock()
	s.now--
	s.mu.Unlock()
}

// lockMany has the client take n locks.
func lockMany(t *testing.T, c *Client, n int) (leases []*Lease) {
	t.Helper()
	for i := range n {
		l, err := c.Mutex(strconv.Itoa(i)).LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	return leases
}

// unlockAll fails if one of the leases has ended.
func unlockAll(t *testing.T, leases []*Lease) {
	t.Helper()
	for _, l := range leases {
		if err := l.Context().Err(); err != nil {
			t.Fatal(err)
		}
		if err := l.Unlock(); err != nil {
			t.Fatal(err)
		}
	}
}

// Leases that were taken together are renewed together each third of their TTL.
func TestVirtualRenewalsOfManyLocksAreSpreadOverAThirtiethOfTheirTTL(t *testing.T) {
	for what, number := range map[string]struct{ hangs, late int }{"all answered": {}, "one hangs": {hangs: 3}, "one is late": {late: 3}} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const ttl = 30 * time.Second
				const locks = 990 // more would be spread further, see TestVirtualLocksTakenTogether
				c := onStub(t, 0, 0, WithTTL(ttl))
				s := &batches{stubServer: stubServer{client: c}, hangs: number.hangs, late: number.late}
				c.server = s
				leases := lockMany(t, c, locks)
				time.Sleep(ttl/2 - time.Second)
				synctest.Wait()
				s.mu.Lock()
				sum, burst, first := 0, 0, s.at[0]
				within := map[time.Duration]int{}
				for i, n := range s.sizes {
					if n > renewalsPerBatch {
						t.Errorf("%d renewals in a batch", n)
					}
					sum += n
					within[s.at[i].Sub(first)/(10*time.Millisecond)] += n
				}
				for _, n := range within {
					burst = max(burst, n)
				}
				took := s.at[len(s.at)-1].Sub(first)
				if sum != locks || took > ttl/30 || took < ttl/40 {
					t.Errorf("%d renewals in %v", sum, took)
				}
				if number.hangs == 0 && (burst > renewalsPerBatch || s.most > 1) {
					t.Errorf("%d renewals within 10 ms, %d batches at once", burst, s.most)
				}
				s.mu.Unlock()
				unlockAll(t, leases)
			})
		})
	}
}

// Wherever in the spread a lock is, its renewals are a third of the TTL apart, and prove it from when they are sent.
func TestVirtualEachLockKeepsItsPlaceInTheSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 30 * time.Second
		c := onStub(t, 0, 0, WithTTL(ttl))
		s := &paces{stubServer: stubServer{client: c}, last: map[string]time.Time{}}
		c.server = s
		leases := lockMany(t, c, 900)
		time.Sleep(5 * ttl)
		synctest.Wait()
		s.mu.Lock()
		if s.longest > ttl/3+20*time.Millisecond || s.oldest > 0 || s.n < 14*900 {
			t.Errorf("%d renewals up to %v apart, sent %v after what they prove", s.n, s.longest, s.oldest)
		}
		s.mu.Unlock()
		unlockAll(t, leases)
	})
}

// paces measures how far the renewals of a lock are apart.
type paces struct {
	stubServer
	mu      sync.Mutex
	last    map[string]time.Time
	longest time.Duration // between two renewals of a lock
	oldest  time.Duration // from the time of a renewal to its sending
	n       int
}

func (s *paces) Renew(ctx context.Context, batch []protocol.Renewal) {
	s.mu.Lock()
	for i := range batch {
		now, key := time.Now(), batch[i].Keys.Lock
		if last, ok := s.last[key]; ok {
			s.longest = max(s.longest, now.Sub(last))
		}
		s.last[key], s.oldest, s.n = now, max(s.oldest, now.Sub(batch[i].At)), s.n+1
	}
	s.mu.Unlock()
	time.Sleep(time.Millisecond) // of virtual time: the way to the server
	s.stubServer.Renew(ctx, batch)
}

// The first renewals of very many are spread over a quarter of the TTL, and the next ones come a third
// of the TTL after each.
func TestVirtualLocksTakenTogetherAreNotRenewedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 30 * time.Second
		locks := 20_000
		if race.Enabled {
			locks = 6_000
		}
		c := onStub(t, 0, 0, WithTTL(ttl))
		s := &batches{stubServer: stubServer{client: c}}
		c.server = s
		began := time.Now()
		leases := lockMany(t, c, locks)
		time.Sleep(ttl)
		synctest.Wait()
		s.mu.Lock()
		seconds, sum := make([]int, 31), 0
		for i, n := range s.sizes {
			seconds[s.at[i].Sub(began)/time.Second] += n
			sum += n
		}
		s.mu.Unlock()
		for second, n := range seconds {
			if n > 3*locks/10 {
				t.Errorf("%d of %d are renewed in second %d", n, locks, second)
			}
		}
		// The second renewals of all are over, the third ones of a part.
		if sum < 2*locks || sum > 3*locks || seconds[1] > 0 {
			t.Errorf("%d renewals of %d leases: %v", sum, locks, seconds)
		}
		unlockAll(t, leases)
	})
}

// One that had no answer until half of its TTL is over does not wait for others.
func TestVirtualAnUrgentRenewalDoesNotWaitForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		s := &batches{stubServer: stubServer{client: c}}
		c.server = s
		var due []protocol.Renewal
		mu := c.Mutex("x")
		mu.Lock()
		e := c.lookup("x")
		for i := range 1000 {
			due = append(due, protocol.Renewal{Owner: e, Keys: &e.keys, Req: e.request(), At: time.Now(), Spare: time.Second})
			if i%2 == 0 {
				due[i].Spare = 0
			}
		}
		c.watchdog.send(due)
		time.Sleep(time.Millisecond)
		synctest.Wait()
		s.mu.Lock()
		if n := len(s.at); n != 500/renewalsPerBatch+1 {
			t.Errorf("%d batches have left", n)
		}
		s.mu.Unlock()
		mu.Unlock()
	})
}

// The first one has hours left, and one of the others hardly a second.
func TestVirtualRenewalsAreSpreadOverTheLeastTimeThatAnyHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onStub(t, 0, 0)
		s := &batches{stubServer: stubServer{client: c}}
		c.server = s
		mu := c.Mutex("x")
		mu.Lock()
		e := c.lookup("x")
		var due []protocol.Renewal
		for i := range 10 * renewalsPerBatch {
			due = append(due, protocol.Renewal{Owner: e, Keys: &e.keys, Req: e.request(), At: time.Now(), Spare: time.Hour})
			if i == renewalsPerBatch {
				due[i].Spare = time.Second
			}
		}
		c.watchdog.send(due)
		time.Sleep(time.Second)
		synctest.Wait()
		s.mu.Lock()
		if n := len(s.at); n != 10 {
			t.Errorf("%d batches have left", n)
		}
		s.mu.Unlock()
		mu.Unlock()
	})
}

// moving is a server whose slots move.
type moving struct {
	stubServer
	moves func(name string, now time.Time) bool
}

func (m *moving) Renew(ctx context.Context, batch []protocol.Renewal) {
	m.stubServer.Renew(ctx, batch)
	for i := range batch {
		if r := &batch[i]; m.moves(r.Keys.Name(), time.Now()) {
			r.Outcome, r.Err = protocol.Unanswered, answer("MOVED 42 127.0.0.1:7000")
		}
	}
}

// With WithReplicas, a grant is sent to one node of a Cluster, too.
func TestVirtualATryWhoseSlotMovesWaitsUntilItHas(t *testing.T) {
	for takes, lines := range map[time.Duration]int{300 * time.Millisecond: 0, time.Minute: 1} {
		synctest.Test(t, func(t *testing.T) {
			var out bytes.Buffer
			client := onStub(t, 0, 0, WithLogger(slog.New(slog.NewTextHandler(&out, nil))))
			began, asked := time.Now(), 0
			client.slotMap.rdb = new(reloads)
			client.server = &movingGrants{stubServer{client: client}, func() bool {
				asked++
				return time.Since(began) < takes
			}}
			l, err := client.Mutex("x").TryLockContext(t.Context())
			took := time.Since(began)
			switch {
			case lines == 0 && (err != nil || took > takes+500*time.Millisecond):
				t.Errorf("a slot that moves for %v: %v after %v", takes, err, took)
			case lines > 0 && (err == nil || !strings.Contains(err.Error(), "MOVED") || took < movingTime || took > 2*movingTime):
				t.Errorf("a slot that moves for %v: %v after %v", takes, err, took)
			}
			if asked > 20 {
				t.Errorf("asked %d times", asked)
			}
			if err == nil {
				unlockAll(t, []*Lease{l})
			}
			synctest.Wait()
			if n := strings.Count(out.String(), "cannot run lock commands now"); n != lines {
				t.Errorf("a slot that moves for %v: %d lines: %s", takes, n, out.String())
			}
		})
	}
}

// movingGrants is a server where a slot moves.
type movingGrants struct {
	stubServer
	moves func() bool
}

func (m *movingGrants) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	if c.Verb == protocol.Acquire && m.moves() {
		return protocol.Answer{}, answer("MOVED 42 127.0.0.1:7000")
	}
	return m.stubServer.Do(ctx, k, c)
}

// The node that was asked first has carried out nothing, and the caller need not wait for a pause to end.
func TestVirtualACommandThatMeetsAnotherNodeIsRepeatedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := settled(t, onStub(t, 0, 0))
		tries := 0
		c.server = &movingGrants{stubServer: stubServer{client: c}, moves: func() bool { tries++; return tries == 1 }}
		began := time.Now()
		l, err := c.Mutex("x").LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != 0 || tries != 2 {
			t.Errorf("with %d tries it took %v", tries, took)
		}
		if err := l.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

// With WithReplicas, renewals are sent to one node of a Cluster, and go-redis follows no redirection there.
func TestVirtualRenewalsThatMeetAnotherNodeAreAnOutageOnlyIfThatGoesOn(t *testing.T) {
	began := time.Time{}
	until := func(end time.Duration) func(string, time.Time) bool {
		return func(name string, now time.Time) bool { return name != "other" && now.Sub(began) < end }
	}
	for what, c := range map[string]struct {
		moves func(name string, now time.Time) bool
		lines int
		ttl   time.Duration
	}{ // the first renewals of leases of a minute are 20 s after the beginning
		"a second":                     {until(21 * time.Second), 0, time.Minute},
		"15 seconds":                   {until(35 * time.Second), 1, time.Minute},
		"a minute, of leases that end": {until(time.Minute), 1, 2 * time.Second},
		"one after the other": {func(name string, now time.Time) bool {
			i, err := strconv.Atoi(name)
			at := 20*time.Second + time.Duration(i%10)*2*time.Second
			return err == nil && at <= now.Sub(began) && now.Sub(began) < at+2*time.Second
		}, 0, 6 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			began = time.Now()
			var out bytes.Buffer
			client := onStub(t, 0, 0, WithTTL(c.ttl), WithLogger(slog.New(slog.NewTextHandler(&out, nil))))
			client.server, client.slotMap.rdb = &moving{stubServer{client: client}, c.moves}, new(reloads)
			other, err := client.Mutex("other", WithTTL(3*time.Second)).LockContext(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			held := lockMany(t, client, 4*renewalsPerBatch)
			time.Sleep(5 * time.Minute)
			if held[0].Context().Err() != nil != (c.ttl < 3*time.Second) {
				t.Errorf("%s: the first lease: %v", what, context.Cause(held[0].Context()))
			}
			for _, l := range held {
				_ = l.Unlock()
			}
			unlockAll(t, []*Lease{other})
			synctest.Wait()
			if n := strings.Count(out.String(), "cannot run lock commands now"); n != c.lines {
				t.Errorf("%s: %d lines of an outage: %s", what, n, out.String())
			}
		})
	}
}
