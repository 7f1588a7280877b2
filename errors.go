package leased

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Compare with errors.Is: what the library returns wraps these together with
// the cause, which is usually a context's error or Redis' own.
var (
	// ErrNotAcquired is matched by every error of LockContext and
	// TryLockContext. The caller holds nothing and has nothing to undo.
	ErrNotAcquired = errors.New("leased: lock not acquired")

	// ErrLocked is returned by TryLockContext when somebody else holds the
	// lock or waits for it. It is an ErrNotAcquired; trying again later is fine.
	ErrLocked error = &kind{"leased: lock is held by another", ErrNotAcquired}

	// ErrLeaseLost is the cause of an ended Lease.Context, the error of Unlock
	// and part of the error of Do when the lock stopped being ours before
	// Unlock, or could no longer be proved ours. Somebody else may have been
	// inside: check or repeat what was done, by fencing token if the resource
	// compares it.
	ErrLeaseLost = errors.New("leased: lease lost")

	// ErrNotReleased is returned by Unlock when Redis did not confirm the
	// release in time. The client goes on trying; the error's text says when
	// the lock ends by itself.
	ErrNotReleased = errors.New("leased: release not confirmed")

	// ErrNoReplicas is reserved for locks that must reach replicas.
	ErrNoReplicas = errors.New("leased: too few replicas confirmed the grant")

	// ErrClosed is returned after Client.Close, and is the cause that ends the
	// contexts of leases still held then.
	ErrClosed error = &kind{"leased: client is closed", nil}

	// ErrInvalidName is returned for a name that cannot be a lock: empty,
	// longer than 512 bytes, not UTF-8, with braces that would put its keys into
	// different cluster slots, or one that is a key beside another lock.
	ErrInvalidName = errors.New("leased: invalid lock name")

	// ErrInvalidOption is returned for an option out of its range. Options are
	// never mended silently.
	ErrInvalidOption = errors.New("leased: invalid option")
)

// kind is a sentinel that is also another one.
type kind struct {
	text string
	is   error
}

func (k *kind) Error() string { return k.text }
func (k *kind) Unwrap() error { return k.is }

// notAcquired says why a caller was not admitted. It matches ErrNotAcquired,
// the reason (a context's error, ErrLocked, ErrClosed, an answer of Redis) and
// the last trouble that Redis gave while the caller waited.
type notAcquired struct {
	name    string
	waited  time.Duration
	reason  error
	trouble error  // last error of Redis, may be nil
	blocker string // readable id of the client that had the lock, may be empty
}

func (e *notAcquired) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "leased: lock %q not acquired", e.name)
	if e.waited >= time.Millisecond {
		fmt.Fprintf(&b, " after %v", e.waited.Round(time.Millisecond))
	}
	if e.reason != nil {
		fmt.Fprintf(&b, ": %s", strings.TrimPrefix(e.reason.Error(), "leased: "))
	}
	if e.blocker != "" {
		fmt.Fprintf(&b, " (held by %s)", e.blocker)
	}
	if e.trouble != nil && !errors.Is(e.reason, e.trouble) {
		fmt.Fprintf(&b, " (last trouble with Redis: %v)", e.trouble)
	}
	return b.String()
}

func (e *notAcquired) Unwrap() []error {
	errs := []error{ErrNotAcquired}
	for _, err := range []error{e.reason, e.trouble} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// notReleased says until when an unconfirmed release may keep others out.
type notReleased struct {
	name    string
	ends    time.Time
	trouble error
}

func (e *notReleased) Error() string {
	s := fmt.Sprintf("leased: release of lock %q not confirmed by Redis; still trying, and the lock ends by itself", e.name)
	if e.ends.IsZero() {
		s += " with its TTL"
	} else {
		s += " at " + e.ends.Format(time.RFC3339Nano)
	}
	if e.trouble != nil {
		s += ": " + e.trouble.Error()
	}
	return s
}

func (e *notReleased) Unwrap() []error {
	if e.trouble == nil {
		return []error{ErrNotReleased}
	}
	return []error{ErrNotReleased, e.trouble}
}

// errRedisClosed is what becomes of a command through a *redis.Client that was closed,
// which no waiting mends.
var errRedisClosed error = redisClosed{}

type redisClosed struct{}

func (redisClosed) Error() string {
	return "the Redis client is closed, so its locks cannot be used any more; close it after the leased.Client"
}
func (redisClosed) Unwrap() []error { return []error{ErrClosed, redis.ErrClosed} }

// errPoolExhausted is one that no connection came free for.
type errPoolExhausted struct{ size int }

func (e errPoolExhausted) Error() string {
	return fmt.Sprintf("no connection to Redis came free in time: the Redis client's pool of %d is exhausted", e.size)
}
func (errPoolExhausted) Unwrap() error { return redis.ErrPoolTimeout }

// otherTypeError says in words what WRONGTYPE means here.
type otherTypeError struct{ answer error }

func (e *otherTypeError) Error() string {
	return "the lock's Redis key, or one beside it, holds another type of value: " +
		"another program, such as Redisson, uses this name: " + e.answer.Error()
}
func (e *otherTypeError) Unwrap() error { return e.answer }

// inWords makes an error of Redis say what it means where its own text does not.
func inWords(err error) error {
	if wrongType(err) {
		return &otherTypeError{err}
	}
	return err
}

var errUnproved = errors.New("leased: " + lostUnproved)

// lostToo is what Unlock returns of a lease that had ended before, where err, nil if
// Redis confirmed, is what came of its release.
func lostToo(err error) error {
	if err == nil {
		return ErrLeaseLost
	}
	return errors.Join(ErrLeaseLost, err)
}

// failure is an error of a command and what it means for the lock. It is made
// once, before the lock hears of it: the methods of err can be a user's, from a
// hook of the Redis client, and nothing of a user's is called while a mutex is held.
type failure struct {
	err  error
	kind failureKind
}

type failureKind uint8

const (
	noAnswer      failureKind = iota // the command may have run, or may run yet
	neverSent                        // there was no connection to send it on
	refusedNow                       // Redis refused it and did nothing; later it may not
	needsOperator                    // likewise, and it will refuse it until somebody changes it
	otherType                        // likewise: a key of the lock holds another type of value
	clientClosed                     // no command is sent any more
)

// classify returns nil for no error.
func classify(err error) *failure {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errRedisClosed):
		return &failure{err, clientClosed}
	case wrongType(err):
		return &failure{err, otherType}
	case mendable(err):
		return &failure{err, needsOperator}
	case definite(err):
		return &failure{err, refusedNow}
	case unsent(err) && !errors.As(err, new(errPoolExhausted)): // that is what we make of it
		return &failure{err, neverSent}
	}
	return &failure{err, noAnswer}
}

// mayRun reports whether the command may have run or may yet run.
func (f *failure) mayRun() bool { return f != nil && f.kind == noAnswer }

// lasts reports whether repeating the command soon is pointless.
func (f *failure) lasts() bool { return f.kind >= needsOperator }

// hopeless reports whether nothing will ever mend it, so that even Lock gives up.
func (f *failure) hopeless() bool { return f.kind == clientClosed }

// mendable reports whether err is an answer of Redis that only an operator can
// change: repeating the command soon is pointless. The markers are searched
// anywhere in the text, for Redis moves them behind a prefix of its own when
// the command that failed was inside a script, and differently in each version.
func mendable(err error) bool {
	if err == nil {
		return false
	}
	for _, mark := range [...]string{
		"NOAUTH", "WRONGPASS", "NOPERM", "WRONGTYPE", "unauthenticated",
		"Operation against a key holding the wrong kind of value",
		"can't run this command", "can't access at least one of the", // inside a script, up to Redis 7.0
		"ACL failure in script", // from Redis 7.2 on, and Valkey
		"running in protected mode",
	} {
		if strings.Contains(err.Error(), mark) {
			return true
		}
	}
	return false
}

// wrongType reports whether a key turned out to hold another type.
func wrongType(err error) bool {
	return err != nil && strings.Contains(err.Error(), "wrong kind of value")
}

// definite reports whether err is an answer of Redis, which then did nothing,
// and not the lack of one, after which the command may have run or may yet run.
func definite(err error) bool {
	var answer redis.Error
	return errors.As(err, &answer)
}

// unsent reports whether the command cannot have left: there was no connection.
func unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial" || errors.Is(err, redis.ErrPoolTimeout)
}

// ofNetwork makes of an error of the network one that does not match a context's error
// even where one of ours ended it: a caller would take it for its own.
func ofNetwork(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		if unsent(err) {
			return &net.OpError{Op: "dial", Err: errors.New(err.Error())}
		}
		return fmt.Errorf("leased: no answer from Redis: %v", err) //nolint:errorlint // on purpose
	}
	return err
}
