package leased

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"
)

const quiet = time.Minute

// journal writes what an operator should know, at most one line a minute for
// each cause. Lock names are written at level Debug only: they can be secrets.
type journal struct {
	logger *slog.Logger // nil: whatever slog.Default is then

	mu   sync.Mutex // guards what follows; not held while logging
	last map[string]time.Time
}

func newJournal(logger *slog.Logger) *journal {
	return &journal{logger: logger, last: map[string]time.Time{}}
}

func (j *journal) write(level slog.Level, cause, text string, args ...any) {
	j.mu.Lock()
	now := time.Now()
	again := now.Sub(j.last[cause]) < quiet
	if !again {
		j.last[cause] = now
	}
	j.mu.Unlock()
	if !again {
		j.log().Log(context.Background(), level, "leased: "+text, args...)
	}
}

func (j *journal) log() *slog.Logger {
	if j.logger != nil {
		return j.logger
	}
	return slog.Default()
}

// trouble: a command failed.
func (j *journal) trouble(name string, err error) {
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
	j.write(level, cause, text, "error", err)
	if log := j.log(); log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("leased: command failed", "lock", name, "error", err)
	}
}

// mute: a lock is taken by somebody who will not say when it is free.
func (j *journal) mute(name, blocker string, left time.Duration) {
	switch {
	case newerFormat(blocker):
		j.write(slog.LevelWarn, "newer", "a lock is in use by a later version of this library; polling for it")
	case left == endless:
		j.write(slog.LevelWarn, "endless", "a lock's key holds a foreign value without expiry; it is never taken over, "+
			"delete it or use ForceUnlock if its owner is gone")
	default:
		return
	}
	if log := j.log(); log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("leased: lock has a foreign owner", "lock", name)
	}
}

func (j *journal) deaf(err error) {
	j.write(slog.LevelWarn, "deaf", "Redis does not let this client subscribe; waiting means polling until that is mended", "error", err)
}

func (j *journal) dropped() {
	j.write(slog.LevelWarn, "spans", "the tracer's span processors are too slow; spans of locks are dropped")
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
	j.write(slog.LevelWarn, "unconfirmed", "a release was not confirmed; still trying", "error", err)
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
