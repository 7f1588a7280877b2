package leased

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// What the client logs: first how a line is written, then the lines. Those about slow callers are in
// slow.go, and those about panics where they are recovered, in entry.go and queue.go.

const (
	quiet    = time.Minute // between two lines of one cause
	maxLines = 1024        // queued for a logger that is slow or blocks

	maxCauses = 100 // beyond that, a cause is not told apart by lock, so that a thousand locks do not log a thousand lines
)

// throttledLog writes what an operator should know, at most one line a minute for each cause. A
// cause that concerns a single lock counts separately for each lock. Lines about a lock name it,
// unless WithoutLockNamesInLogs says that names are secrets. The logger, and the methods of errors,
// which can be user code, are called in order in the goroutine of lines, and for losses in that of
// the losses; only Shutdown waits for them.
type throttledLog struct {
	logger    *slog.Logger // nil: whatever slog.Default returns at the time
	hideNames bool         // whether lock names are secret
	prefix    string       // of the locks' keys
	lines     asyncQueue[func()]

	lastGarbage atomic.Int64 // when a garbage line was last added to lines, in ns of Unix time

	// Used only by the goroutine of lines:
	last   map[string]time.Time // when each cause last had a line
	outage []string             // the causes that had a line since Redis last answered again
	failed time.Time            // when a command last failed for a reason that does not concern one lock alone
	away   map[int]bool         // the servers of a quorum of which the last line says that they do not answer
}

func newThrottledLog(o *clientOptions) *throttledLog {
	l := &throttledLog{logger: o.logger, hideNames: o.hideNames, prefix: o.prefix, last: map[string]time.Time{}, away: map[int]bool{}}
	l.lines.limit, l.lines.what, l.lines.hideNames = maxLines, "the logger", o.hideNames
	l.lines.deliver = func(line func()) {
		line()
		if l.lines.dropped.Load() > 0 && time.Since(l.last["dropped"]) >= quiet {
			l.print(slog.LevelWarn, "dropped", "log lines were dropped: they were too many at once, or the logger is too slow", "lines", l.lines.dropped.Swap(0))
		}
	}
	return l
}

// later calls f in the goroutine that may log.
func (l *throttledLog) later(f func()) { l.lines.add(f) }

// write logs a line, unless its cause had one within the last minute.
func (l *throttledLog) write(level slog.Level, cause, text string, args ...any) {
	l.later(func() { l.print(level, cause, text, args...) })
}

// print is like write, but is called in the goroutine of lines. It reports whether it logged the line.
func (l *throttledLog) print(level slog.Level, cause, text string, args ...any) bool {
	now := time.Now()
	if last, ok := l.last[cause]; ok && now.Sub(last) < quiet {
		return false
	}
	l.last[cause] = now
	l.log().Log(context.Background(), level, "leased: "+text, args...)
	return true
}

// causeOf returns the cause of a line about one lock: a cause of its own or, once there are too
// many causes, the one that all locks share.
func (l *throttledLog) causeOf(cause, name string) string {
	if len(l.last) >= maxCauses {
		now := time.Now()
		maps.DeleteFunc(l.last, func(_ string, last time.Time) bool { return now.Sub(last) >= quiet })
	}
	if len(l.last) >= maxCauses {
		return cause
	}
	return cause + " of " + name
}

// withLock adds to args the name of the lock that a line is about, unless names are secret.
func (l *throttledLog) withLock(name string, args ...any) []any {
	if l.hideNames {
		return args
	}
	return append([]any{"lock", name}, args...)
}

// reason returns what is logged of an error. Where names are secret, that is its text without the arguments
// of the command, which some errors repeat, and without the name of the lock that the line is about. If it
// is about no single lock, name is "", and of what a server says only the first word is logged. It calls a
// method of err, so it is called in the goroutine of lines.
func (l *throttledLog) reason(name string, err error) any {
	if !l.hideNames {
		return err
	}
	text, _, hasArguments := strings.Cut(err.Error(), ", with args beginning with")
	switch {
	case name == "" && !hasArguments && redisserver.IsServerReply(err): // it may name any lock
		text = firstWord(err)
		if lacks := new(redisserver.LackingError); errors.As(err, &lacks) {
			text = lacks.What() + ": " + firstWord(lacks.Answer)
		}
	case name != "":
		text = withoutWord(withoutWord(text, l.prefix+name), name)
	}
	return text
}

// withoutWord replaces word in text wherever it is not part of a longer word.
func withoutWord(text, word string) string {
	inWord := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }
	var b strings.Builder
	for from := 0; ; {
		i := strings.Index(text[from:], word)
		if i < 0 {
			b.WriteString(text[from:])
			return b.String()
		}
		i += from
		end := i + len(word)
		before, _ := utf8.DecodeLastRuneInString(text[:i])
		after, _ := utf8.DecodeRuneInString(text[end:])
		if inWord(before) || inWord(after) {
			_, first := utf8.DecodeRuneInString(text[i:])
			end = i + first
			b.WriteString(text[from:end])
		} else {
			b.WriteString(text[from:i] + "[secret]")
		}
		from = end
	}
}

func (l *throttledLog) log() *slog.Logger {
	if l.logger != nil {
		return l.logger
	}
	return slog.Default()
}

// failedCommand is a command about a lock that failed.
type failedCommand struct {
	name string // of the lock
	fail *protocol.Failure
}

// commandsFailed logs that commands failed, and what that means for the locks. An outage has renewals of
// very many locks fail together, which are not to fill the queue of lines.
func (l *throttledLog) commandsFailed(failed ...failedCommand) {
	l.later(func() {
		for _, each := range failed {
			l.commandFailed(each.name, each.fail)
		}
	})
}

// commandFailed is called in the goroutine of lines.
func (l *throttledLog) commandFailed(name string, fail *protocol.Failure) {
	err := fail.Err
	if fail.Kind != protocol.ClientClosed && errors.Is(err, ErrClosed) {
		return // the client itself is closed, which it need not report
	}
	level, cause, text := slog.LevelWarn, "network", "Redis does not answer; trying again"
	var other *redisserver.OtherTypeError
	if errors.As(err, &other) {
		err = other.Answer // the text below says what it means
	}
	switch fail.Kind {
	case protocol.ClientClosed:
		level, cause, text = slog.LevelError, "closed", "the Redis client was closed before the leased.Client; its locks are not released"
	case protocol.OtherType:
		level, cause = slog.LevelError, l.causeOf(firstWord(err), name)
		text = "another program, such as Redisson, keeps another type of value under a lock's name; an operator has to fix this"
	case protocol.NeedsOperator:
		level, cause = slog.LevelError, firstWord(err)
		text = "Redis refuses lock commands; an operator has to fix this"
	case protocol.RefusedNow:
		cause, text = firstWord(err), "Redis cannot run lock commands now; trying again"
	}
	if fail.Kind != protocol.OtherType && firstWord(err) != "NOPERM" { // the latter may be about the keys of one lock
		l.failed = time.Now()
	}
	if level == slog.LevelWarn && !slices.Contains(l.outage, cause) {
		l.outage = append(l.outage, cause)
	}
	l.print(level, cause, text, l.withLock(name, "error", l.reason(name, err))...)
	if log := l.log(); log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("leased: command failed", l.withLock(name, "error", l.reason(name, err))...)
	}
}

// foreignOwner logs that the owner of a lock will not publish its release.
func (l *throttledLog) foreignOwner(name, blocker string, left time.Duration) {
	cause, text := "newer", "a lock is in use by a later version of this library; polling for it"
	switch {
	case protocol.NewerFormat(blocker):
	case left == protocol.Endless:
		cause, text = "endless", "a lock's key holds another program's value without an expiry, so the lock is never "+
			"taken over; if that owner is gone, delete the key or use ForceUnlock"
	default:
		return
	}
	l.later(func() {
		l.print(slog.LevelWarn, l.causeOf(cause, name), text, l.withLock(name)...)
	})
}

// answersAgain logs that an outage is over, and how long it lasted. Another outage within a minute has
// lines of its own: the last line must not say that Redis answers while it does not.
func (l *throttledLog) answersAgain(after string) {
	l.later(func() {
		for _, cause := range l.outage {
			delete(l.last, cause)
		}
		l.outage = nil
		l.log().Info("leased: Redis answers again after " + after)
	})
}

// silentConnections logs that connections of the pool had fallen silent, although the server answers.
func (l *throttledLog) silentConnections(n int) {
	l.write(slog.LevelWarn, "silent", "closed connections to Redis that had stopped answering, although a new one answers", "connections", n)
}

// serverLeft logs that a server of a quorum does not answer, unless the last line says so already. If the
// server had a line within the last minute, it has to be called again: the last line must not say that a
// server answers that does not.
func (l *throttledLog) serverLeft(at serverName, answering, of int, why error) {
	l.later(func() {
		if !l.away[at.number] {
			l.away[at.number] = l.print(slog.LevelWarn, at.cause("away"), "a server of the quorum does not answer",
				at.withServer("answering", answering, "servers", of, "error", l.reason("", why))...)
		}
	})
}

// serverReturned logs that a server of a quorum answers again, if the last line says that it does not.
func (l *throttledLog) serverReturned(at serverName, answering, of int, after time.Duration) {
	l.later(func() {
		if l.away[at.number] {
			l.away[at.number] = false
			l.log().Info("leased: a server of the quorum answers again after "+inWords(after),
				at.withServer("answering", answering, "servers", of)...)
		}
	})
}

// serverYoung logs that a server has restarted without its data, or is new, at Warn if that leaves too
// few servers that may vote: then there are no locks until the quarantine ends. Nor is it normal that a server
// loses its data again soon.
func (l *throttledLog) serverYoung(at serverName, left time.Duration, tooFew, again bool) {
	level := slog.LevelInfo
	if tooFew {
		level = slog.LevelWarn
	}
	l.later(func() {
		cause := at.cause("young")
		delete(l.last, cause) // each loss has a line: an operator counts from it when the next server may restart
		args := at.withServer("for", left)
		if again {
			l.print(slog.LevelWarn, cause, "a server of the quorum has lost its data again; its vote does not count yet", args...)
		} else {
			l.print(level, cause, "a server of the quorum is new or has lost its data; its vote does not count yet", args...)
		}
	})
}

// serverRefuses logs that a server of a quorum answers, but refuses a command.
func (l *throttledLog) serverRefuses(at serverName, why error) {
	l.later(func() {
		l.print(slog.LevelWarn, at.cause("refuses"), "a server of the quorum rejects commands",
			at.withServer("error", l.reason("", why))...)
	})
}

// serverName says which server of a quorum a line is about; it is zero if there is only one server.
type serverName struct {
	number int // counted from 1
	addr   string
}

// cause returns the cause of a line about the server.
func (s serverName) cause(what string) string { return fmt.Sprint(what, " ", s.number) }

// withServer adds to args which server a line is about.
func (s serverName) withServer(args ...any) []any {
	if s.number == 0 {
		return args
	}
	return append([]any{"server", s.number, "addr", s.addr}, args...)
}

func (l *throttledLog) subscribeDenied(at serverName, err error) {
	text := "Redis does not let this client subscribe; waiting means polling until that is fixed"
	if at.number > 0 {
		text = "a server of the quorum does not let this client subscribe; if a majority does not, waiting means polling"
	}
	l.later(func() {
		l.print(slog.LevelWarn, at.cause("subscribe denied"), text, at.withServer("error", l.reason("", err))...)
	})
}

// subscribed notes that a subscription is allowed, so that the next refusal has a line of its own.
func (l *throttledLog) subscribed(at serverName) {
	l.later(func() { delete(l.last, at.cause("subscribe denied")) })
}

func (l *throttledLog) subscribeFailed(err error) {
	l.later(func() {
		if time.Since(l.failed) < quiet { // commands fail as well, and have lines of their own
			return
		}
		l.print(slog.LevelWarn, "subscribe failed", "no subscription can be made; waiting means polling until one can",
			"error", l.reason("", err))
	})
}

func (l *throttledLog) spansDropped() {
	l.write(slog.LevelWarn, "spans", "the tracer's span processors, or instruments, are too slow; spans and measurements of locks are dropped")
}

func (l *throttledLog) publishDenied(at serverName) {
	text := "Redis does not let lock scripts publish; waiting means polling until that is fixed"
	if at.number > 0 {
		text = "a server of the quorum does not let lock scripts publish; if a majority does not, waiting means polling"
	}
	l.write(slog.LevelWarn, at.cause("publish denied"), text, at.withServer()...)
}

func (l *throttledLog) noEcho(at serverName) {
	l.write(slog.LevelWarn, at.cause("no echo"), "no messages arrive from Redis; subscribing again", at.withServer()...)
}

// garbage looks at the time before it adds a line: thousands of messages a second would fill the queue, and have
// other lines dropped.
func (l *throttledLog) garbage(text string) {
	last, now := l.lastGarbage.Load(), time.Now().UnixNano()
	if time.Duration(now-last).Abs() < quiet || !l.lastGarbage.CompareAndSwap(last, now) {
		return
	}
	var args []any
	if !l.hideNames { // a message has the name of a lock in it
		args = []any{"begins", firstBytes(text, 24)}
	}
	l.write(slog.LevelWarn, "garbage", "received a message that is not for this client", args...)
}

// collected logs that a lease was garbage-collected. site is where it was locked, "" if that is not known.
func (l *throttledLog) collected(name, site string) {
	args := withSite(l.withLock(name), "locked_at", site)
	l.later(func() {
		l.print(slog.LevelError, l.causeOf("collected", name), "a lease was garbage-collected without Unlock; it is no longer renewed, "+
			"and this process keeps its callers out until Mutex.Unlock", args...)
	})
}

var errSilent = errors.New("no reply so far")

func (l *throttledLog) unconfirmed(name string, err error) {
	text := "a release was not confirmed; still trying"
	var unconfirmed *notReleased
	if errors.As(err, &unconfirmed) {
		err = unconfirmed.lastErr
		switch {
		case unconfirmed.over && errors.Is(err, ErrClosed):
			text = "a release was not confirmed, because a client was closed"
		case unconfirmed.over:
			text = "a release was not confirmed, and the lock's TTL has passed"
		}
		if err == nil { // the text of the whole names the lock
			err = errSilent
		}
	}
	l.later(func() {
		l.print(slog.LevelWarn, "unconfirmed", text, l.withLock(name, "error", l.reason(name, err))...)
	})
}

// lost is the default loss handler. It logs every loss, because the work under each lease may have
// overlapped with another owner's. But losses that come together for one reason, such as those of
// an outage, share a line. It is called in the goroutine of the losses.
func (l *throttledLog) lost(events []LossEvent) {
	log := l.log()
	for len(events) > 0 {
		ev := events[0]
		var same, others []LossEvent
		for _, each := range events {
			if each.Reason == ev.Reason {
				same = append(same, each)
			} else {
				others = append(others, each)
			}
		}
		events = others
		if len(same) == 1 {
			log.Error("leased: lease lost before Unlock", l.withLock(ev.Name, "token", ev.Token, "reason", ev.Reason, "ttl", ev.TTL)...)
			continue
		}
		args := []any{"leases", len(same), "reason", ev.Reason}
		if !l.hideNames {
			names := make([]string, len(same))
			for i := range same {
				names[i] = same[i].Name
			}
			args = append(args, "locks", someNames(names))
		}
		log.Error("leased: leases lost before Unlock", args...)
		for i := 0; i < len(same) && log.Enabled(context.Background(), slog.LevelDebug); i++ {
			log.Debug("leased: lease lost before Unlock", l.withLock(same[i].Name, "token", same[i].Token, "reason", ev.Reason, "ttl", same[i].TTL)...)
		}
	}
}

// someNames returns the first few of the names of locks, and says how many more there are.
func someNames(names []string) string {
	slices.Sort(names)
	names = slices.Compact(names)
	shown := make([]string, min(len(names), 3))
	for i := range shown {
		shown[i] = strconv.Quote(names[i])
	}
	text := strings.Join(shown, ", ")
	if more := len(names) - len(shown); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// inWords returns a duration as people say it.
func inWords(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return fmt.Sprintf("%.0f s", d.Seconds())
}

func (l *throttledLog) noPolicy() {
	l.write(slog.LevelError, "policy", "the back-off factory returned nil; the default policy is used")
}

func (l *throttledLog) lossesDropped() {
	l.write(slog.LevelError, "losses dropped", "some losses were not reported: the loss handler, or the logger, is too slow")
}

func (l *throttledLog) unknownClient() {
	l.write(slog.LevelWarn, "unknown", "unknown type of Redis client: its commands have no deadlines of their own, and dead waiters "+
		"are not skipped; pass New the client inside it, or add that client's method Options")
}

func (l *throttledLog) unbounded() {
	l.write(slog.LevelWarn, "unbounded", "commands of this Redis client cannot be given deadlines of their own; set its ContextTimeoutEnabled, and no timeout of -2")
}

func (l *throttledLog) keepsSentinel() {
	l.write(slog.LevelWarn, "sentinel", "a Sentinel that hangs would keep this Redis client from finding a new primary; set ReadTimeout and MaxRetries "+
		"so that twice as many reads as these allow fit into its DialTimeout, for example to 2s and -1 with a DialTimeout of 5s")
}

func firstWord(err error) string {
	word, _, _ := strings.Cut(err.Error(), " ")
	return word
}

func firstBytes(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}
