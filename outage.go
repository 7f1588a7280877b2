package leased

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	probeEvery = 2 * time.Second // one lock of a client looks whether Redis is well again
	wakeEvery  = time.Second     // a deployment that is half broken must not have all locks ask all the time
)

// outage ends the locks' pauses when Redis is well again. Each lock that fails backs
// off by itself, for up to 30 s; left alone, a lock that became free with Redis would
// stay so for as long. So while the server as a whole is in trouble, one lock that
// waits out a pause asks every 2 s, or as soon as anything is answered, and when a
// lock that had failed is answered all others that wait out a pause ask too.
//
// An answer to another lock or a renewal is only a reason to probe: in a Cluster it
// may come from another node, and a full server goes on renewing.
type outage struct {
	client *Client
	alarm  alarm
	on     atomic.Bool // a command failed for a reason that concerns the server; none was answered to a lock in trouble since

	mu     sync.Mutex // guards what follows; only watchdog.mu is locked under it
	next   time.Time  // when the alarm rings, zero if it is not set
	wake   bool       // all are to ask then
	woken  time.Time  // when they were last
	probed time.Time  // when one was, or a command failed
}

func newOutage(c *Client) *outage {
	o := &outage{client: c}
	o.alarm.owner = o
	return o
}

func (o *outage) setLocked(at time.Time) {
	o.next = at
	o.client.dog.set(&o.alarm, at)
}

// failed: a command of a lock, or a renewal, failed. What only an operator can mend
// concerns one lock or one user of Redis, not the server; nothing mends a closed client.
func (o *outage) failed(fail *failure) {
	if fail.lasts() {
		return
	}
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.on.Store(true)
	o.probed = now
	if o.next.IsZero() { // else failures of others, such as renewals, could put the probe off for ever
		o.setLocked(now.Add(probeEvery))
	}
}

// answered: a command was, of a lock that was in trouble or of another.
func (o *outage) answered(troubled bool) {
	if !o.on.Load() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if troubled {
		o.on.Store(false)
		o.wake = true
		o.setLocked(o.woken.Add(wakeEvery))
	} else if at := o.probed.Add(wakeEvery); !o.wake && at.Before(o.next) {
		o.setLocked(at)
	}
}

// ring has one lock probe, or all ask.
func (o *outage) ring(now time.Time, batch []renewal) []renewal {
	o.mu.Lock()
	wake, on := o.wake, o.on.Load()
	o.next, o.wake = time.Time{}, false
	switch {
	case wake:
		o.woken = now
	case on:
		o.probed = now
		o.setLocked(now.Add(probeEvery))
	}
	o.mu.Unlock()
	if !wake && !on {
		return batch
	}
	asked := false
	for _, e := range o.client.entries() {
		asked = e.retry() || asked
		if asked && !wake {
			break
		}
	}
	if !asked && !wake {
		o.over(now)
	}
	return batch
}

// over: at that time no lock waited out a pause. Whichever fails next begins anew.
func (o *outage) over(then time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.probed.Equal(then) && !o.wake { // nothing has failed meanwhile
		o.on.Store(false)
		o.next = time.Time{}
		o.client.dog.remove(&o.alarm)
	}
}

// retry ends the pause of a lock whose last command failed, and reports whether it
// asks.
func (e *entry) retry() (asks bool) {
	now := time.Now()
	var fx effects
	e.mu.Lock()
	if e.dead || e.lock.grant.inFlight != nothing || e.pauses == nil { // pauses is nobody's then
		e.mu.Unlock()
		return false
	}
	asks = e.lock.reachable(now, &fx)
	spent := e.settledLocked()
	e.mu.Unlock()
	e.perform(&fx, spent, 0)
	return asks
}
