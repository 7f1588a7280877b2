package leased

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// How requests are canceled. note schedules a cancel, and start has a flush begin: it sends the cancels
// that are due and schedules the rest, until none is due.
//
// The flush is a goroutine, and there is at most one: started by start or by the alarm, owned by the
// client, ended when nothing is due, and waited for by Shutdown. In a Cluster it does not send itself,
// but divides the cancels among lanes, so that a master that hangs delays no cancel at the others. A
// lane is one more goroutine for each master that has cancels to carry out: started by the flush,
// owned by the client, ended when its master has no more to carry out, and waited for by Shutdown.

// canceler cancels requests that are no longer wanted but may still wait or own in Redis, so that nothing
// is left behind there: after a caller gave up, after a release without a reply, after a message about an
// unknown request, or when Redis has said that a lease is not ours. It sends one cancel per request, many
// cancels in a round trip, and to each server one round trip at a time; the schedule says when.
type canceler struct {
	alarm
	client *Client

	mu          sync.Mutex // guards what follows; only watchdog.mu is locked under it
	schedule    lockstate.CancelSchedule
	awaited     map[string]bool // ids of cancels that an Unlock waits for, or has waited for
	unconfirmed int             // releases that cancels are to confirm, whether an Unlock waits for that or not
	flush       flushState
	flushed     chan struct{} // made by drain; closed when everything that is due was tried

	// In a Cluster, lanes holds the cancels that wait while their master carries out others. A
	// master has an entry as long as its lane is running.
	lanes map[*redis.Client][]*lockstate.Cancellation
}

// flushState says how far the flush has come.
type flushState uint8

const (
	noFlush      flushState = iota
	flushNoted              // start has yet to begin it
	flushRunning            // its goroutine was started, or a lane has become it
)

func newCanceler(client *Client) *canceler {
	return &canceler{client: client, awaited: map[string]bool{}, lanes: map[*redis.Client][]*lockstate.Cancellation{}}
}

// add has a request canceled from now on.
func (c *canceler) add(cancel *lockstate.Cancellation) {
	c.note(cancel)
	c.start()
}

// note schedules a cancel, and leaves it to start to have it sent. If an Unlock already waits for a cancel
// of that id, that cancel is enough: the answer to another one would take away the proof that the lock was
// ours, and leave none to the cancel that the Unlock waits for.
//
// A step of a lock notes its cancels under the lock's mutex. Otherwise a later step could have the same
// request canceled first, or remove the lock: then Shutdown waits only for the cancels that it finds here.
func (c *canceler) note(cancel *lockstate.Cancellation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := cancel
	for last.Then != nil {
		last = last.Then
	}
	switch {
	case len(last.Callers) > 0:
		for each := cancel; each != nil; each = each.Then {
			c.awaited[each.ID] = true
		}
	case c.awaited[cancel.ID] && cancel.Then == nil:
		return
	}
	inLanes := 0 // which the schedule's own bound does not count
	for _, waiting := range c.lanes {
		inLanes += len(waiting)
	}
	if inLanes >= lockstate.MaxCancels && !last.Release {
		return
	}
	if !c.schedule.Add(cancel, time.Now()) {
		return
	}
	if last.Release {
		c.unconfirmed++
	}
	c.noteFlushLocked()
}

// released notes that a request is given back with a minimum hold that goes on for a time.
func (c *canceler) released(id string, rest time.Duration, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.schedule.Released(id, now.Add(rest), now)
}

// fire begins a flush when the next cancel is due.
func (c *canceler) fire(_ time.Time, batch []protocol.Renewal) []protocol.Renewal {
	c.mu.Lock()
	c.noteFlushLocked()
	c.mu.Unlock()
	c.start()
	return batch
}

// noteFlushLocked has start begin a flush, unless one is under way.
func (c *canceler) noteFlushLocked() {
	if c.flush == noFlush {
		c.flush = flushNoted
	}
}

// start begins the flush that was noted, if any. The calling goroutine holds no mutex.
func (c *canceler) start() {
	c.mu.Lock()
	begins := c.flush == flushNoted
	if begins {
		c.flush = flushRunning
	}
	c.mu.Unlock()
	if begins {
		c.run(c.sendDue)
	}
}

// run runs f in a goroutine of the canceler. If the client has stopped, it drops all cancels instead.
func (c *canceler) run(f func()) {
	if !c.client.group.start(f) {
		c.giveUp()
	}
}

// sendDue is the flush: it sends what is due, or passes it to lanes, until nothing is due. If user code
// ends its goroutine, as testing.T.FailNow does, another goroutine continues.
func (c *canceler) sendDue() {
	unlabeled()
	ifCutShort(func() { c.run(c.sendDue) }, func() {
		for batch := c.take(); len(batch) > 0; batch = c.take() {
			if c.client.slotMap.masters != nil {
				byMaster(c.client, batch, keysOf, c.enlist)
			} else {
				c.send(batch)
			}
			if c.giveUpIfStopped() {
				return
			}
		}
	})
}

// giveUpIfStopped drops all cancels if the client has stopped, and reports whether it has. It is called
// after a batch: Shutdown may have dropped them while that was under way, and nothing would send it again.
func (c *canceler) giveUpIfStopped() bool {
	if c.client.base.Err() == nil {
		return false
	}
	c.giveUp()
	return true
}

// enlist has cancels sent to a master by its lane.
func (c *canceler) enlist(master *redis.Client, cancels []*lockstate.Cancellation) {
	c.mu.Lock()
	waiting, running := c.lanes[master]
	c.lanes[master] = append(waiting, cancels...)
	c.mu.Unlock()
	if !running {
		c.run(func() { c.lane(master) })
	}
}

// lane sends what waits for a master until nothing waits. Then it becomes the flush if there is none,
// because the answers have changed what is due next. If user code ends its goroutine, another one
// continues.
func (c *canceler) lane(master *redis.Client) {
	unlabeled()
	becomesFlush := false
	ifCutShort(func() { c.run(func() { c.lane(master) }) }, func() {
		var batch []*lockstate.Cancellation
		for batch, becomesFlush = c.next(master); len(batch) > 0; batch, becomesFlush = c.next(master) {
			c.send(batch)
			if c.giveUpIfStopped() {
				return
			}
		}
	})
	if becomesFlush {
		c.sendDue()
	}
}

// next returns the cancels that a lane sends now. If there are none, it ends the lane, and reports
// whether it now has to be the flush.
func (c *canceler) next(master *redis.Client) (batch []*lockstate.Cancellation, becomesFlush bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if waiting := c.lanes[master]; len(waiting) > 0 {
		n := min(len(waiting), lockstate.CancelsAtOnce)
		c.lanes[master] = waiting[n:]
		return waiting[:n:n], false
	}
	delete(c.lanes, master)
	if c.flush != noFlush {
		return nil, false
	}
	c.flush = flushRunning
	return nil, true
}

// take returns the cancels to be sent now. If there are none, it sets the alarm for the next one
// and ends the flush.
func (c *canceler) take() []*lockstate.Cancellation {
	c.mu.Lock()
	defer c.mu.Unlock()
	batch := c.schedule.Take(time.Now())
	if len(batch) > 0 {
		return batch
	}
	c.endFlushLocked()
	if next := c.schedule.Next(); !next.IsZero() {
		c.client.watchdog.set(c, next)
	}
	return nil
}

// send sends a batch, and takes the outcome. If user code panics, or ends the goroutine, the cancels
// count as sent without a reply.
func (c *canceler) send(batch []*lockstate.Cancellation) {
	var results []protocol.Canceled
	now := time.Now()
	ctx, stop := context.WithTimeout(c.client.commandContext(spanOfCancels(batch)), protocol.CommandTimeout)
	defer stop()
	defer func() {
		for len(results) < len(batch) {
			results = append(results, protocol.Canceled{Fail: &protocol.Failure{Err: protocol.ErrPanicked, Kind: protocol.NoAnswer}})
		}
		c.answered(batch, results, now)
	}()
	defer c.client.recoverPanic("a hook of the Redis client")
	requests := make([]protocol.CancelRequest, len(batch))
	for i, cancel := range batch {
		requests[i] = protocol.CancelRequest{Keys: keysOf(cancel), ID: cancel.ID, Last: cancel.Last, Link: cancel.Link, Cooldown: cancel.Cooldown(now)}
	}
	c.client.slotMap.await(ctx)
	began := c.client.metrics.startTiming(ctx)
	results = c.client.server.Cancel(ctx, requests)
	var failed *protocol.Failure
	for i := range results {
		if results[i].Fail != nil {
			failed = results[i].Fail
		}
	}
	c.client.metrics.recordCommand(ctx, commandCancel, began.elapsed(), failed)
}

// answered passes the outcomes to the schedule, and to the callers that wait for them.
func (c *canceler) answered(batch []*lockstate.Cancellation, results []protocol.Canceled, sent time.Time) {
	var settled []lockstate.Settlement
	now := time.Now()
	c.mu.Lock()
	for i, cancel := range batch {
		s := c.schedule.Answered(cancel, results[i], now)
		if s.Owner != nil { // it was answered, or is given up
			delete(c.awaited, cancel.ID)
		}
		if s.Release {
			c.unconfirmed--
		}
		if len(s.Callers) > 0 {
			settled = append(settled, s)
		}
	}
	c.mu.Unlock()
	for _, s := range settled {
		s.Owner.(*entry).canceled(&s)
	}
	for i, cancel := range batch {
		if fail := results[i].Fail; fail != nil {
			c.client.slotMap.commandFailed(fail)
			c.client.downtime.commandFailed(fail, sent, workKeeps)
			c.client.logFailure(keysOf(cancel).Name(), fail)
		} else {
			c.client.downtime.commandAnswered(workKeeps)
		}
	}
}

func (e *entry) canceled(s *lockstate.Settlement) {
	e.step(func(now time.Time, fx *lockstate.Effects) { e.stateLocked().Canceled(s, now, fx) })
}

// keysOf returns the keys of the lock that the cancel is about: a lock in use, or one that this
// client knows only from a message.
func keysOf(cancel *lockstate.Cancellation) *protocol.Keys {
	if e, ok := cancel.Owner.(*entry); ok {
		return &e.keys
	}
	return cancel.Owner.(*protocol.Keys)
}

// drain waits until everything that is due was tried, and Redis has answered for each release and each
// cancel that had no answer, or until ctx ends.
func (c *canceler) drain(ctx context.Context) {
	for {
		c.mu.Lock()
		if c.idleLocked() && c.unconfirmed == 0 && c.schedule.Lingering() == 0 {
			c.mu.Unlock()
			return
		}
		if c.flushed == nil {
			c.flushed = make(chan struct{})
		}
		flushed := c.flushed
		c.mu.Unlock()
		if !waitFor(ctx, flushed) {
			return
		}
	}
}

// unanswered returns for how many releases Redis has not answered, and how many requests of callers that gave
// up may still get their lock.
func (c *canceler) unanswered() (releases, requests int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unconfirmed, c.schedule.Lingering()
}

// idleLocked reports whether everything that is due was tried.
func (c *canceler) idleLocked() bool { return c.flush == noFlush && len(c.lanes) == 0 }

// endFlushLocked notes that a flush has ended.
func (c *canceler) endFlushLocked() {
	c.flush = noFlush
	if c.idleLocked() && c.flushed != nil {
		close(c.flushed)
		c.flushed = nil
	}
}

// giveUp drops all cancels, because the client has stopped. TTLs end what is left in Redis.
func (c *canceler) giveUp() {
	c.mu.Lock()
	all := c.schedule.Pending
	for _, waiting := range c.lanes {
		all = append(all, waiting...)
	}
	clear(c.lanes)
	c.schedule, c.unconfirmed = lockstate.CancelSchedule{}, 0
	c.endFlushLocked()
	clear(c.awaited)
	c.mu.Unlock()
	for _, cancel := range all {
		for ; cancel != nil; cancel = cancel.Then {
			if s := (lockstate.Settlement{Owner: cancel.Owner, Callers: cancel.Callers, Fail: &protocol.Failure{Err: ErrClosed, Kind: protocol.ClientClosed}}); len(s.Callers) > 0 {
				s.Owner.(*entry).canceled(&s)
			}
		}
	}
}
