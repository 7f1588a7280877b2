package leased

import (
	"container/heap"
	"context"
	"slices"
	"sync"
	"time"
)

// renewalsPerBatch bounds one pipeline: a larger one would keep the server from
// others for longer than a lock's hand-off takes.
const renewalsPerBatch = 250

// A timer stands still while the machine sleeps, and then rings late by the sleep: one
// for the end of an eight-hour window by eight hours. So the watchdog compares the
// clocks this often while anything is to be watched, once for all locks.
const (
	clocksCompared = time.Second
	shortestSleep  = 10 * time.Millisecond
)

// watchdog is the one goroutine that knows what time it is: it has every grant
// renewed before its TTL ends, ends leases whose trust window closed, and wakes
// locks that want to look again. It never waits for Redis. Renewals that are due
// together leave together, in batches, each with a goroutine of its own, so that
// a batch that hangs delays no other and no deadline.
type watchdog struct {
	client *Client
	wake   chan struct{} // an earlier alarm was set
	quit   chan struct{}
	once   sync.Once

	mu     sync.Mutex // guards what follows; nothing else is locked under it
	alarms alarmHeap
	looked time.Time // when the clocks were last compared
	next   time.Time // when the goroutine looks again, zero for not by itself
}

// alarm is a call of its owner at some time.
type alarm struct {
	due   time.Time // written under the owner's lock as well, while it is set
	index int       // place in the heap + 1, 0 if not set
	owner ringer
}

// ringer is what an alarm calls. It adds to batch what it wants renewed.
type ringer interface {
	ring(now time.Time, batch []renewal) []renewal
}

func newWatchdog(c *Client) *watchdog {
	return &watchdog{client: c, wake: make(chan struct{}, 1), quit: make(chan struct{})}
}

// set has a ring at due, instead of any other time.
func (w *watchdog) set(a *alarm, due time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a.due = due
	if a.index == 0 {
		heap.Push(&w.alarms, a)
	} else {
		heap.Fix(&w.alarms, a.index-1)
	}
	if w.next.IsZero() || due.Before(w.next) {
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
	a.due = time.Time{}
}

// halt ends the goroutine. Alarms set later never ring.
func (w *watchdog) halt() { w.once.Do(func() { close(w.quit) }) }

// run is the watchdog: owned by the client, ended by halt, waited for by Close.
func (w *watchdog) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var due []*alarm
	for {
		select {
		case <-timer.C:
		case <-w.wake:
		case <-w.quit:
			return
		}
		now := time.Now()
		due = w.take(now, due[:0])
		var batch []renewal
		for _, a := range due {
			batch = a.owner.ring(now, batch)
		}
		for part := range slices.Chunk(batch, renewalsPerBatch) {
			w.client.crew.start(func() { w.client.renew(part) })
		}
		if next := w.plan(now); !next.IsZero() {
			timer.Reset(time.Until(next))
		}
	}
}

// take returns the alarms that are due, which are no longer set: those of all locks,
// if the machine has slept, for a window may have ended meanwhile.
func (w *watchdog) take(now time.Time, due []*alarm) []*alarm {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.looked.IsZero() && gain(w.looked, now) > shortestSleep {
		for _, a := range w.alarms {
			if _, ok := a.owner.(*entry); ok {
				due = append(due, a)
			}
		}
		for _, a := range due {
			heap.Remove(&w.alarms, a.index-1)
		}
	}
	w.looked = now
	for len(w.alarms) > 0 && !w.alarms[0].due.After(now) {
		due = append(due, heap.Pop(&w.alarms).(*alarm))
	}
	return due
}

// plan returns when to look again, zero for not by itself.
func (w *watchdog) plan(now time.Time) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = time.Time{}
	if len(w.alarms) > 0 {
		w.next = earlier(w.alarms[0].due, now.Add(clocksCompared))
	}
	return w.next
}

// renew sends a batch and tells the locks what came of it. It is a sender, like
// entry.run. Only the pipeline itself, which has hooks, calls code of the user's
// before all locks have been told.
func (c *Client) renew(batch []renewal) {
	ctx, stop := context.WithTimeout(c.base, commandTimeout)
	defer stop()
	c.sendRenewals(ctx, batch)
	answered := false
	for i := range batch {
		r := &batch[i]
		answered = answered || r.err == nil
		r.entry.step(func(now time.Time, fx *effects) {
			// "Not ours" of what was unlocked meanwhile is no loss.
			if r.outcome != notOurs || r.entry.lock.holds(r.req.id) {
				c.stats.renewed(r.outcome)
			}
			r.entry.lock.renewed(r, now, fx)
		})
	}
	// Last, for these can hang, and no lock may wait for that.
	defer c.survive("a hook of the Redis client, or an error of one,")
	if answered {
		c.outage.answered(false)
	}
	for i := range batch {
		if r := &batch[i]; r.err != nil {
			fail := classify(r.err)
			c.inbox.suspect(fail)
			c.outage.failed(fail)
			c.journal.trouble(r.entry.keys.name, r.err)
		}
	}
	if err := c.server.touch(ctx, batch); err != nil {
		c.inbox.suspect(classify(err))
		c.journal.trouble(batch[0].entry.keys.name, err)
	}
	c.inbox.prove(ctx)
}

// sendRenewals renews. What a panic leaves without outcome has none.
func (c *Client) sendRenewals(ctx context.Context, batch []renewal) {
	returned := false
	defer func() {
		for i := range batch {
			if r := &batch[i]; !returned && r.outcome == unanswered && r.err == nil {
				r.err = errPanicked
			}
		}
	}()
	defer c.survive("a hook of the Redis client")
	c.server.renew(ctx, batch)
	returned = true
}

type alarmHeap []*alarm

func (h alarmHeap) Len() int           { return len(h) }
func (h alarmHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h alarmHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i+1, j+1
}

func (h *alarmHeap) Push(x any) {
	a := x.(*alarm)
	*h = append(*h, a)
	a.index = len(*h)
}

func (h *alarmHeap) Pop() any {
	old := *h
	a := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	a.index = 0
	return a
}
