package lockstate

import (
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// EventLog collects what happens to one caller, for its spans. The lock only appends to the log,
// so that it calls no user code and reads no clock; spans are made from the log afterwards. A
// nil log drops everything. Most callers have none.
type EventLog struct {
	Maker      any // what makes spans from the log
	List       []Event
	waitEvents int            // how many events of List belong to the wait; set when the caller is admitted
	entered    bool           // whether the caller has been admitted
	From       *protocol.Span // hold span of the lease that this one follows, nil if unknown
	Hold       *protocol.Span // the caller's hold span, nil if it is not sampled
	Wait       *protocol.Span // the caller's wait span, nil if it is not sampled or has not begun

	// Blocker is the value that the lock's own key had when Redis was last asked. It is set only
	// if the caller waited behind another process and From does not say which lease it
	// followed: the owner died, was evicted, or is not traced.
	Blocker string
}

// Event is one entry of an EventLog.
type Event struct {
	At    time.Time
	What  EventKind
	Place int // queued: how many waiters are ahead
	Token uint64
	Text  string
	Err   error // its Error method is called later, because it may be user code
}

// EventKind is what an Event is about.
type EventKind uint8

const (
	EventQueued        EventKind = iota // behind other callers of this process
	EventQueuedInRedis                  // behind other processes; Text is the value of the lock's own key
	eventError                          // Redis did not do what it was asked to do
	eventWoken
	eventWantedHere // a caller of this process waits for the lock, and is the first to do so
	eventWanted     // another process waits for the lock
	EventDowngraded // Token is the writer's
	eventLost
	eventSlow // the wait or hold has exceeded the user's threshold
)

// maxEvents bounds the events of a log that recur for as long as a wait or a lease lasts: errors, requests
// that are made anew because too few replicas confirm a grant, and callers and processes that come and give
// up. All others are few.
const maxEvents = 64

// add appends n, unless the log is full and n is an event that recurs.
func (e *EventLog) add(n Event) {
	if e != nil && (len(e.List) < maxEvents || !e.recurs(n.What)) {
		e.List = append(e.List, n)
	}
}

// recurs reports whether the log may do without another event of this kind. That the caller waits behind other
// processes is told once at least.
func (e *EventLog) recurs(what EventKind) bool {
	switch what {
	case eventError, eventWantedHere, eventWanted:
		return true
	case EventQueuedInRedis:
		return e.has(EventQueuedInRedis)
	}
	return false
}

func (e *EventLog) has(what EventKind) bool {
	for i := range e.List {
		if e.List[i].What == what {
			return true
		}
	}
	return false
}

// admitted ends the events of the wait, because the caller enters. prev is the hold span of the
// lease before it, and blocker the value of the lock's own key when Redis was last asked.
func (e *EventLog) admitted(how Via, prev *protocol.Span, blocker string, now time.Time) {
	if e == nil {
		return
	}
	e.entered = true
	if len(e.List) == 0 && how != ViaDirect {
		return // the caller waited only for Redis's answer
	}
	e.add(Event{At: now, What: eventWoken})
	e.waitEvents = len(e.List)
	if how == ViaLocal || how == ViaDirect {
		e.From = prev
	}
	if e.From != nil {
		return
	}
	if e.has(EventQueuedInRedis) {
		e.Blocker = blocker
	}
}

// HoldSpan returns the caller's hold span, nil if it has none.
func (e *EventLog) HoldSpan() *protocol.Span {
	if e == nil {
		return nil
	}
	return e.Hold
}

// TakeWaitEvents removes and returns the events of a wait that has ended: all up to the caller's admission,
// even if its call returned an error because its context ended at that moment.
func (e *EventLog) TakeWaitEvents() []Event {
	n := len(e.List)
	if e.entered {
		n = e.waitEvents
	}
	var wait []Event
	wait, e.List, e.waitEvents = e.List[:n:n], e.List[n:], 0
	return wait
}

// TakeHoldEvents removes and returns the events of the hold. Those of the wait have been taken before.
func (e *EventLog) TakeHoldEvents() []Event {
	rest := e.List
	e.List = nil
	return rest
}

// Contended reports whether another caller or process waits for the lock.
func (l *Lock) Contended() bool { return l.waiting.first != nil || l.grant.wanted }

// addEventInside adds an event to the log of every caller whose lease depends on the grant.
func (l *Lock) addEventInside(n Event) {
	for c := l.members; c != nil; c = c.next {
		c.Events.add(n)
	}
}

func (k EventKind) String() string {
	return [...]string{"queued", "queued_in_redis", "error", "woken", "wanted_here", "wanted", "downgraded", "lost", "slow"}[k]
}
