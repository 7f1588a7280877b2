package leased

import (
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Waits and holds that have not ended yet. Spans and measurements report them only when they end,
// which for a stuck lock may be never.

const (
	// maxSlowLocks bounds the locks that one look logs, each in at most two lines. The others are counted,
	// and those that are still slow then are left for the next look.
	maxSlowLocks = 10
	// maxSlowLines bounds the lines of the last minute, below the number of causes that the log tells
	// apart.
	maxSlowLines = maxCauses * 8 / 10
)

// slowWatch logs callers that have waited, or have been inside, for longer than threshold, each of
// them at most once. It looks while locks are in use.
type slowWatch struct {
	client    *Client
	threshold time.Duration
	looks     ticker

	// waits and holds say, by the lock's name, when a wait for it and a hold of it were last logged, if
	// that was within the last minute. Until then no further one is logged, but it is looked at again
	// later: it may be the one that does not end. Used only by the watchdog's goroutine, through looks.
	waits, holds map[string]time.Time
}

func newSlowWatch(c *Client, threshold time.Duration) *slowWatch {
	s := &slowWatch{client: c, threshold: threshold, waits: map[string]time.Time{}, holds: map[string]time.Time{}}
	s.looks.init(c, threshold/4, s.look)
	return s
}

// noteUse is called when a lock comes into use.
func (s *slowWatch) noteUse() {
	if s.threshold > 0 {
		s.looks.start()
	}
}

// slowLock is what a look at one lock has found.
type slowLock struct {
	name     string
	wait     time.Duration // 0: nobody has waited for long
	hold     time.Duration // 0: nobody has been inside for long
	token    uint64        // of the caller inside for long
	waitSite string        // where the waiting caller made its call
	holdSite string        // where the caller inside made its call
	waiting  int           // callers of this process that wait
	blocker  string        // the owner, if that is another process
	ownOwner bool          // whether a caller of this process is inside, or was and Redis has the lock as ours still
}

// look logs each lock that a caller has waited for, or been inside of, for longer than the threshold,
// once for that caller.
func (s *slowWatch) look(now time.Time) {
	c := s.client
	more := 0
	for _, told := range []map[string]time.Time{s.waits, s.holds} {
		maps.DeleteFunc(told, func(_ string, last time.Time) bool { return now.Sub(last) >= quiet+time.Second }) // print reads the clock a little later
	}
	var found []slowLock
	for _, e := range c.entries() {
		full := len(found) == maxSlowLocks || len(s.waits)+len(s.holds) >= maxSlowLines
		one, slow := s.lookAt(e, now, full)
		switch {
		case !slow:
		case full:
			more++
		default:
			found = append(found, one)
		}
	}
	for i := range found {
		c.log.slow(&found[i])
	}
	if more > 0 {
		c.log.moreSlow(more)
	}
}

// lookAt reports whether a lock has a slow caller that was not logged yet. Unless full, it returns what to log
// of the lock, and notes that it is logged.
func (s *slowWatch) lookAt(e *entry, now time.Time, full bool) (one slowLock, slow bool) {
	c := s.client
	since := now.Add(-s.threshold).Sub(c.began)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.awake == nil && (full || !e.resting.SlowHold(since)) { // to wake all locks of a client takes too long
		return one, e.resting.SlowHold(since)
	}
	defer e.restLocked()
	name := e.keys.Name()
	_, waited := s.waits[name]
	_, held := s.holds[name]
	wait, hold := e.stateLocked().Slow(since, !waited, !held)
	if slow = wait != nil || hold != nil; full || !slow {
		return one, slow
	}
	waiting, within := e.stateLocked().Counts()
	blocker := e.stateLocked().Blocker()
	who, known := protocol.OwnerOf(blocker)
	one = slowLock{name: name, waiting: waiting, blocker: blockerName(blocker), ownOwner: within > 0 || known && who.Client == c.id}
	if wait != nil {
		s.waits[name] = now
		wait.SetSlow(now)
		one.wait, one.waitSite = now.Sub(c.began.Add(wait.Since)), callOf(wait).extras().site
	}
	if hold != nil {
		s.holds[name] = now
		hold.SetSlow(now)
		one.hold, one.token, one.holdSite = now.Sub(c.began.Add(hold.Since)), hold.Token, callOf(hold).extras().site
	}
	return one, true
}

// callSite returns the file and line of the innermost call on the stack that is neither in this package nor, as
// in the Wait of a sync.Cond, in package sync; or "" if there is none within reach, as after go mu.Lock().
func callSite() string {
	var pcs [16]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for {
		f, more := frames.Next()
		ours := strings.HasPrefix(f.Function, modulePath+".") || syncOrRuntime.MatchString(f.Function)
		if f.File != "" && !ours {
			return fmt.Sprintf("%s:%d", f.File, f.Line)
		}
		if !more {
			return ""
		}
	}
}

// syncOrRuntime matches functions of these packages, and none of a module whose path only begins like that.
var syncOrRuntime = regexp.MustCompile(`^(sync|runtime)\.[^/]*$`)

// slow logs that a caller has waited, or has been inside, for long: for each lock, one of either in a
// minute. Where callers wait for a stuck lock in turn, each until its own timeout, each is slow.
func (l *throttledLog) slow(s *slowLock) {
	l.later(func() {
		if s.hold > 0 {
			l.print(slog.LevelWarn, l.causeOf("held", s.name), "a lock has been held for a long time",
				withSite(l.withLock(s.name, "held", s.hold, "token", s.token, "waiting", s.waiting), "locked_at", s.holdSite)...)
		}
		if s.wait > 0 {
			owner := s.blocker
			switch {
			case s.ownOwner:
				owner = "this process"
			case owner == "":
				owner = "unknown"
			}
			l.print(slog.LevelWarn, l.causeOf("waited", s.name), "a caller has waited a long time for a lock",
				withSite(l.withLock(s.name, "waited", s.wait, "owner", owner, "waiting", s.waiting), "called_at", s.waitSite)...)
		}
	})
}

// withSite appends what callSite returned, unless that is "".
func withSite(args []any, key, site string) []any {
	if site == "" {
		return args
	}
	return append(args, key, site)
}

func (l *throttledLog) moreSlow(n int) {
	l.write(slog.LevelWarn, "more slow", "other locks have also had long holds or waits", "locks", n)
}
