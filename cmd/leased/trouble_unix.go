//go:build unix

package main

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// troubleLog is the logger of the client. It remembers why Redis does not give the lock, or renew its lease.
type troubleLog struct {
	// warnings has room for the first warning that names no error: that the lock may never become
	// free, because its key has no expiry, for example.
	warnings chan string
	failures chan error // has room for the first failure

	mu    sync.Mutex // guards what follows
	err   error      // what went wrong first, nil while all is well
	since time.Time  // when it did
	last  error      // what went wrong last
	at    time.Time  // when it did
}

func (t *troubleLog) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}
func (t *troubleLog) WithAttrs([]slog.Attr) slog.Handler { return t }
func (t *troubleLog) WithGroup(string) slog.Handler      { return t }

func (t *troubleLog) Handle(_ context.Context, line slog.Record) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if strings.HasPrefix(line.Message, "leased: Redis answers again") {
		t.err = nil
		return nil
	}
	aboutLock, err := false, error(nil)
	line.Attrs(func(a slog.Attr) bool {
		aboutLock = aboutLock || a.Key == "lock"
		if a.Key == "error" {
			err, _ = a.Value.Any().(error)
		}
		return true
	})
	// Lines that are not about the lock tell of less, such as a subscription that is refused.
	if line.Level < slog.LevelWarn || !aboutLock {
		return nil
	}
	if err == nil {
		select {
		case t.warnings <- line.Message:
		default: // there was one
		}
		return nil
	}
	t.last, t.at = err, time.Now()
	if t.err == nil {
		t.err, t.since = err, t.at
	}
	select {
	case t.failures <- err:
	default: // there was one
	}
	return nil
}

// lasting returns what has been the trouble for a while, or nil.
func (t *troubleLog) lasting() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil || time.Since(t.since) < lastingTrouble {
		return nil
	}
	return t.err
}

// after returns the last trouble since a time, or nil. Some kinds of trouble end without a word, and what is said of
// one kind again within a minute is not logged.
func (t *troubleLog) after(since time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.at.Before(since) {
		return nil
	}
	return t.last
}

const lastingTrouble = 5 * time.Second // longer than most restarts and failovers
