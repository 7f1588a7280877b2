package leased

import (
	"container/heap"
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// Everything that happens at a given time: alarms, the goroutine that fires them, and the renewals
// that follow.
//
// There are four kinds of goroutine here: the watchdog, see run; a sender for each batch of
// renewals, which is owned by the client, ended by the replies or the timeouts of its round trips,
// and waited for by Shutdown; one that spreads batches, see spread; and in a Cluster one that
// divides what is due among the masters, see send.

// renewalsPerBatch bounds one pipeline, so that the server carries it out in less than a
// millisecond and then serves others.
const renewalsPerBatch = 50

// A timer stands still while the machine sleeps, and then fires late by the length of the sleep:
// the timer for the end of an eight-hour window by as much as eight hours. So while any alarm is
// set, the watchdog compares the clocks this often, once for all locks.
const (
	compareEvery = time.Second
	minSleep     = 10 * time.Millisecond
)

// watchdog is the client's timer goroutine: it has every grant renewed before its TTL ends, ends
// leases whose trust window has closed, and wakes locks that want to re-check. It never waits for
// Redis. Renewals that are due together are sent together in batches, each in a separate goroutine,
// so that a batch that hangs delays no deadline. If there are many batches, they are sent one after
// another. In a Cluster, each master has its own batches, so one that hangs
// delays no other's.
type watchdog struct {
	client *Client
	wake   chan struct{} // an earlier alarm was set
	quit   chan struct{}
	once   sync.Once

	mu       sync.Mutex // guards what follows; nothing else is locked under it
	alarms   alarmHeap
	compared time.Time         // when the clocks were last compared
	next     lockstate.Instant // when the goroutine wakes up next, 0 if only an alarm will wake it
}

// alarm is embedded in what the watchdog calls at a given time.
type alarm struct {
	// due is when the target is called, 0 if not set. Once the call has begun, it stays as it is
	// until the target removes or sets the alarm. That of an entry is written under both
	// watchdog.mu and the entry's mutex, so either is enough to read it.
	due   lockstate.Instant
	index int // place in the heap + 1, 0 if not set
}

func (a *alarm) ownAlarm() *alarm { return a }

// timerTarget embeds an alarm. When the alarm is due, fire adds to batch what the target wants
// renewed.
type timerTarget interface {
	ownAlarm() *alarm
	fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal
}

func newWatchdog(c *Client) *watchdog {
	return &watchdog{client: c, wake: make(chan struct{}, 1), quit: make(chan struct{})}
}

// instant returns t as an instant of the client's locks.
func (w *watchdog) instant(t time.Time) lockstate.Instant {
	return lockstate.InstantOf(t, w.client.began)
}

// set makes t fire at due, instead of at the time that was set before.
func (w *watchdog) set(t timerTarget, due time.Time) { w.setInstant(t, w.instant(due)) }

func (w *watchdog) setInstant(t timerTarget, due lockstate.Instant) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := t.ownAlarm()
	a.due = due
	if a.index == 0 {
		heap.Push(&w.alarms, t)
	} else {
		heap.Fix(&w.alarms, a.index-1)
	}
	if w.next == 0 || due < w.next {
		w.next = due
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

func (w *watchdog) remove(a *alarm) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if a.index != 0 {
		heap.Remove(&w.alarms, a.index-1)
	}
	a.due = 0
}

// ticker calls do at regular intervals while locks are in use, and once after that, in the
// watchdog's goroutine.
type ticker struct {
	alarm
	client *Client
	every  time.Duration
	do     func(now time.Time)
	set    atomic.Bool // whether the alarm is set
}

func (t *ticker) init(c *Client, every time.Duration, do func(time.Time)) {
	t.client, t.every, t.do = c, every, do
}

// start is called when a lock comes into use.
func (t *ticker) start() {
	if !t.set.Load() && t.set.CompareAndSwap(false, true) {
		t.client.watchdog.set(t, time.Now().Add(t.every))
	}
}

func (t *ticker) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	t.do(now)
	t.set.Store(false)
	if t.client.anyInUse() { // checked after set is cleared, or a lock that comes into use now would find it set
		t.start()
	}
	return batch
}

// halt ends the goroutine. Alarms set later never fire.
func (w *watchdog) halt() { w.once.Do(func() { close(w.quit) }) }

// run is the watchdog's goroutine: owned by the client, ended by halt, waited for by
// Shutdown.
func (w *watchdog) run() {
	unlabeled()
	timer := time.NewTimer(compareEvery)
	timer.Stop() // the first alarm to be set arrives through wake
	defer timer.Stop()
	var due []timerTarget
	for {
		select {
		case <-timer.C:
		case <-w.wake:
		case <-w.quit:
			return
		}
		now := time.Now()
		due = w.take(now, due[:0])
		var batch []protocol.Renewal
		for _, t := range due {
			batch = t.fire(now, batch)
		}
		clear(due) // it must keep no lock that is not in use anymore
		w.send(batch)
		if next := w.plan(now); next != 0 {
			timer.Reset(time.Until(next.Time(w.client.began)))
		}
	}
}

// manyLocks is from how many locks on a server would notice if all of them were renewed at the same time.
const manyLocks = 1000

// holdsMany reports whether so many locks have an alarm.
func (w *watchdog) holdsMany() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.alarms) >= manyLocks
}

// send has renewals sent. In a Cluster, a goroutine divides them among the masters first. It is owned
// by the client, ended once the masters are named, which takes a second at most, and waited for by
// Shutdown.
func (w *watchdog) send(due []protocol.Renewal) {
	if w.client.slotMap.masters == nil || len(due) < 2 {
		w.sendTogether(due)
		return
	}
	w.client.group.start(func() {
		keys := func(r protocol.Renewal) *protocol.Keys { return r.Keys }
		byMaster(w.client, due, keys, func(_ *redis.Client, part []protocol.Renewal) { w.sendTogether(part) })
	})
}

// sendTogether has a batch renewed that one server has to answer: urgent renewals at once, and the
// others at once as well if they are few.
func (w *watchdog) sendTogether(batch []protocol.Renewal) {
	var urgent, regular []protocol.Renewal
	var spare time.Duration // the least of all regular renewals
	for _, r := range batch {
		if r.Spare <= 0 {
			urgent = append(urgent, r)
			continue
		}
		if spare == 0 || r.Spare < spare {
			spare = r.Spare
		}
		regular = append(regular, r)
	}
	for part := range slices.Chunk(urgent, renewalsPerBatch) {
		w.client.group.start(func() { w.client.renew(part) })
	}
	switch {
	case len(regular) == 0:
	case len(regular) <= renewalsPerBatch:
		w.client.group.start(func() { w.client.renew(regular) })
	default:
		// The same order each time, so that a lock's renewals are a third of its TTL apart wherever in the
		// spread it is.
		slices.SortFunc(regular, func(a, b protocol.Renewal) int { return strings.Compare(a.Keys.Lock, b.Keys.Lock) })
		parts := slices.Collect(slices.Chunk(regular, renewalsPerBatch))
		w.client.group.start(func() { w.spread(parts, spare) })
	}
}

// spread sends batches one after another, evenly over a given time. If many were sent at once, the
// server would do nothing else until it had carried them out. After a late answer, the remaining
// batches have equally less time each, so that they need not all leave at the end. Batches that
// have not left by the end of that time, because the server is slow or a batch hangs, leave then.
//
// Its goroutine is owned by the client, ended by the end of that time or by halt, and waited for by
// Shutdown.
func (w *watchdog) spread(parts [][]protocol.Renewal, over time.Duration) {
	unlabeled()
	ctx, stop := context.WithTimeout(context.Background(), over)
	defer stop()
	answered := make(chan struct{}) // closed when the batch before was answered
	close(answered)
	end := time.Now().Add(over)
	turn := time.NewTimer(0)
	defer turn.Stop()
	for i, part := range parts {
		select {
		case <-turn.C:
		case <-ctx.Done():
		case <-w.quit:
			return
		}
		select {
		case <-answered:
		case <-ctx.Done():
		case <-w.quit:
			return
		}
		now := time.Now()
		for i := range part { // they were decided on earlier, and prove the leases from when they are sent
			part[i].At = now
		}
		done := make(chan struct{})
		if !w.client.group.start(func() { defer close(done); w.client.renew(part) }) {
			return
		}
		answered = done
		turn.Reset(time.Until(end) / time.Duration(len(parts)-i))
	}
}

// take returns the targets that are due, and removes their alarms. After the machine has slept, or its
// wall clock was set, these are all locks: a trust window may have ended meanwhile, and until ownership
// is proved once more nobody enters.
func (w *watchdog) take(now time.Time, due []timerTarget) []timerTarget {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.compared.IsZero() && lockstate.Gain(w.compared, now).Abs() > minSleep {
		for _, t := range w.alarms {
			if _, ok := t.(*entry); ok {
				due = append(due, t)
			}
		}
		for _, t := range due {
			heap.Remove(&w.alarms, t.ownAlarm().index-1)
		}
	}
	w.compared = now
	for len(w.alarms) > 0 && w.alarms[0].ownAlarm().due <= w.instant(now) {
		due = append(due, heap.Pop(&w.alarms).(timerTarget))
	}
	return due
}

// plan returns when the goroutine wakes up next, 0 if only an alarm will wake it.
func (w *watchdog) plan(now time.Time) lockstate.Instant {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = 0
	if len(w.alarms) > 0 {
		w.next = min(w.alarms[0].ownAlarm().due, w.instant(now.Add(compareEvery)))
	}
	return w.next
}

// renew sends a batch and gives each lock its outcome, even if user code ends the goroutine, as
// testing.T.FailNow does: a Lease.Check would wait for the next renewal otherwise.
func (c *Client) renew(batch []protocol.Renewal) {
	ctx := c.commandContext(spanOfRenewals(batch)) // without a deadline, because each round trip has its own
	c.slotMap.await(ctx)
	took := time.Duration(-1)
	defer func() { c.renewed(ctx, batch, took) }()
	took = c.sendRenewals(ctx, batch)
}

// renewed gives each lock of a batch its outcome. Only then does it call user code, which can hang.
func (c *Client) renewed(ctx context.Context, batch []protocol.Renewal, took time.Duration) {
	for i := range batch {
		r := &batch[i]
		e := r.Owner.(*entry)
		e.step(func(now time.Time, fx *lockstate.Effects) {
			held := e.stateLocked().Holds(r.Req.ID)
			e.stateLocked().Renewed(r, now, fx)
			// "Not ours" is no loss if the lock was let go in the meantime, or may be ours under another id.
			if r.Outcome != protocol.NotOurs || held && !e.stateLocked().Holds(r.Req.ID) {
				c.stats.countRenewal(r.Outcome)
			}
		})
	}
	c.noteRenewals(ctx, batch, took)
}

// noteRenewals notes what the outcomes of a batch say about Redis, and extends the last tokens of the locks
// whose renewals ask for that.
func (c *Client) noteRenewals(ctx context.Context, batch []protocol.Renewal, took time.Duration) {
	defer c.recoverPanic("a hook of the Redis client, or an error of one,")
	if slices.ContainsFunc(batch, func(r protocol.Renewal) bool { return r.Err == nil }) {
		c.downtime.commandAnswered(workKeeps)
		c.outage.answered(false)
	}
	var failed *protocol.Failure
	defer func() { c.metrics.recordCommand(ctx, commandRenew, took, failed) }()
	var logged []failedCommand
	for i := range batch {
		if r := &batch[i]; r.Err != nil {
			fail := redisserver.Classify(r.Err)
			failed = fail
			c.alone.requireProbe(fail)
			c.slotMap.commandFailed(fail)
			if fail.Again && c.slotMap.moves(r.Keys.Lock, r.Req.TTL/3, time.Now()) {
				continue // it says nothing about the server; but it does if that goes on
			}
			c.downtime.commandFailed(fail, r.At, workKeeps)
			c.outage.failed(fail, time.Now())
			if !c.cutShort(fail) {
				logged = append(logged, failedCommand{r.Keys.Name(), fail})
			}
		}
	}
	if len(logged) > 0 {
		c.log.commandsFailed(logged...)
	}
	if err := c.server.Touch(ctx, batch); err != nil {
		fail := redisserver.Classify(err)
		c.alone.requireProbe(fail)
		c.logFailure(batch[0].Keys.Name(), fail)
	}
	c.alone.probe(ctx, batch[0].Keys)
}

// sendRenewals sends a batch. If user code panics or ends the goroutine, the renewals that have no
// outcome yet count as sent without a reply. It returns how long the round trip took, or a negative
// duration if that is not measured.
func (c *Client) sendRenewals(ctx context.Context, batch []protocol.Renewal) (took time.Duration) {
	returned := false
	took = -1 //nolint:wastedassign // a panic on the way leaves it so
	defer func() {
		for i := range batch {
			if r := &batch[i]; !returned && r.Outcome == protocol.Unanswered && r.Err == nil {
				r.Err = protocol.ErrPanicked
			}
		}
	}()
	defer c.recoverPanic("a hook of the Redis client")
	if c.pool != nil {
		key := batch[0].Keys.Lock
		patience := max(renewalPatience(batch), 2*c.pool.roundTrip.Estimate())
		overdue := time.AfterFunc(patience, func() { c.pool.hadNoAnswer(key) })
		defer overdue.Stop()
	}
	sent, began := time.Now(), c.metrics.startTiming(ctx)
	c.server.Renew(ctx, batch)
	took = began.elapsed()
	returned = true
	if c.pool != nil && batch[0].Err == nil {
		c.pool.roundTrip.Took(time.Since(sent))
	}
	return took
}

const (
	minRenewalPatience = 250 * time.Millisecond
	maxRenewalPatience = 500 * time.Millisecond
)

// renewalPatience is how long a batch waits for its answer, at least, before the connections to Redis are looked
// at. Until CommandTimeout and for a second one, a lease of a few seconds could not wait.
func renewalPatience(batch []protocol.Renewal) time.Duration {
	patience := maxRenewalPatience
	for i := range batch {
		patience = min(patience, batch[i].Req.TTL/10)
	}
	return max(patience, minRenewalPatience)
}

// alarmHeap implements heap.Interface for targets with an alarm, the earliest first.
type alarmHeap []timerTarget

func (h alarmHeap) Len() int           { return len(h) }
func (h alarmHeap) Less(i, j int) bool { return h[i].ownAlarm().due < h[j].ownAlarm().due }
func (h alarmHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].ownAlarm().index, h[j].ownAlarm().index = i+1, j+1
}

func (h *alarmHeap) Push(x any) {
	t := x.(timerTarget)
	*h = append(*h, t)
	t.ownAlarm().index = len(*h)
}

func (h *alarmHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	t.ownAlarm().index = 0
	return t
}
