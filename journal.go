package leased

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"
)

const quiet = time.Minute

const mostLines = 1024 // that wait for a logger that is slow or blocks; each cause has a line a minute

// journal writes what an operator should know, at most one line a minute for
// each cause. Lock names are written at level Debug only: they can be secrets.
// The logger, and the methods of errors, are called in a goroutine of their own,
// in order: nobody waits for them.
type journal struct {
	logger *slog.Logger // nil: whatever slog.Default is then
	lines  backlog[func()]

	last map[string]time.Time // touched by that goroutine only
}

func newJournal(logger *slog.Logger) *journal {
	j := &journal{logger: logger, last: map[string]time.Time{}}
	j.lines.most, j.lines.what = mostLines, "the logger"
	j.lines.deliver = func(line func()) {
		line()
		if n := j.lines.dropped.Swap(0); n > 0 {
			j.log().Warn("leased: the logger is too slow; lines were dropped", "lines", n)
		}
	}
	return j
}

// later has f called where it may log.
func (j *journal) later(f func()) { j.lines.add(f) }

func (j *journal) write(level slog.Level, cause, text string, args ...any) {
	j.later(func() { j.print(level, cause, text, args...) })
}

// print is write for who is in the journal's goroutine already.
func (j *journal) print(level slog.Level, cause, text string, args ...any) {
	now := time.Now()
	if last, ok := j.last[cause]; ok && now.Sub(last) < quiet {
		return
	}
	j.last[cause] = now
	j.log().Log(context.Background(), level, "leased: "+text, args...)
}

func (j *journal) log() *slog.Logger {
	if j.logger != nil {
		return j.logger
	}
	return slog.Default()
}

// trouble: a command failed.
func (j *journal) trouble(name string, err error) {
	j.later(func() {
		fail := classify(err)
		if fail.kind != clientClosed && errors.Is(err, ErrClosed) {
			return // ours
		}
		level, cause, text := slog.LevelWarn, "network", "Redis does not answer; trying again"
		var other *otherTypeError
		if errors.As(err, &other) {
			err = other.answer // what it means is said here
		}
		switch fail.kind {
		case clientClosed:
			level, cause, text = slog.LevelError, "closed", "the Redis client was closed before the leased.Client; its locks are not released"
		case otherType:
			level, cause = slog.LevelError, firstWord(err)
			text = "another program, such as Redisson, keeps another type of value under a lock's name; an operator has to mend that"
		case needsOperator:
			level, cause = slog.LevelError, firstWord(err)
			text = "Redis refuses lock commands; an operator has to mend that"
		case refusedNow:
			cause, text = firstWord(err), "Redis cannot run lock commands now; trying again"
		}
		j.print(level, cause, text, "error", err)
		if log := j.log(); log.Enabled(context.Background(), slog.LevelDebug) {
			log.Debug("leased: command failed", "lock", name, "error", err)
		}
	})
}

// mute: a lock is taken by somebody who will not say when it is free.
func (j *journal) mute(name, blocker string, left time.Duration) {
	cause, text := "newer", "a lock is in use by a later version of this library; polling for it"
	switch {
	case newerFormat(blocker):
	case left == endless:
		cause, text = "endless", "a lock's key holds a foreign value without expiry; it is never taken over, "+
			"delete it or use ForceUnlock if its owner is gone"
	default:
		return
	}
	j.later(func() {
		j.print(slog.LevelWarn, cause, text)
		if log := j.log(); log.Enabled(context.Background(), slog.LevelDebug) {
			log.Debug("leased: lock has a foreign owner", "lock", name)
		}
	})
}

func (j *journal) deaf(err error) {
	j.write(slog.LevelWarn, "deaf", "Redis does not let this client subscribe; waiting means polling until that is mended", "error", err)
}

func (j *journal) dropped() {
	j.write(slog.LevelWarn, "spans", "the tracer's span processors, or instruments, are too slow; spans and measurements of locks are dropped")
}

func (j *journal) denied() {
	j.write(slog.LevelWarn, "denied", "Redis does not let lock scripts publish; waiting means polling until that is mended")
}

func (j *journal) silent() {
	j.write(slog.LevelWarn, "silent", "the inbox does not hear from Redis; subscribing again")
}

func (j *journal) garbage(text string) {
	j.write(slog.LevelWarn, "garbage", "the inbox got a message that is not for it", "begins", firstBytes(text, 24))
}

func (j *journal) collected() {
	j.write(slog.LevelError, "collected", "a lease was garbage-collected without Unlock; it is not renewed any more, "+
		"and this process keeps its callers out until Mutex.Unlock")
}

func (j *journal) unconfirmed(err error) {
	var unconfirmed *notReleased
	if errors.As(err, &unconfirmed) {
		err = unconfirmed.trouble // the text of the whole names the lock
	}
	j.write(slog.LevelWarn, "unconfirmed", "a release was not confirmed; still trying", "error", err)
}

func (j *journal) noPolicy() {
	j.write(slog.LevelError, "policy", "the back-off factory returned nil; the default policy is used")
}

func (j *journal) untold() {
	j.write(slog.LevelError, "untold", "the loss handler is too slow; it is not told of every loss")
}

func (j *journal) unknownClient() {
	j.write(slog.LevelWarn, "unknown", "nothing is known of this type of Redis client: its commands are not bounded one by one, "+
		"and a waiter that died is not skipped; give it the method Options of the client that it wraps")
}

func (j *journal) unbounded() {
	j.write(slog.LevelWarn, "unbounded", "the commands of this Redis client cannot be bounded one by one; set its ContextTimeoutEnabled")
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

// lost is the default loss handler. Each loss is told of: each is somebody's
// work that may have been done beside another's.
func (j *journal) lost(ev LossEvent) {
	j.log().Error("leased: lease lost before Unlock", "reason", ev.Reason, "token", ev.Token)
	if log := j.log(); log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("leased: lease lost before Unlock", "lock", ev.Name)
	}
}
