package leased

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// Compare errors with errors.Is. Most errors of this package wrap one of these together with the cause,
// which is usually the error of a context or of Redis. If a context ended with a cause of its own, the
// text names that cause, and the error matches what the cause matches, except the errors below: that
// another lease was lost does not mean that this one was.
var (
	// ErrNotAcquired is matched by every error of LockContext and TryLockContext. The caller
	// holds nothing and has nothing to undo. An owner named in the text is the one that Redis
	// named when it last answered, up to 20 s earlier unless it has failed to answer since.
	ErrNotAcquired = lockstate.ErrNotAcquired

	// ErrLocked is returned by TryLockContext when another caller holds the lock or waits for it, or when
	// a caller of this process has not unlocked although its lease has ended. LockContext returns it,
	// together with the context's error, if ctx ended while another caller held the lock as far as Redis
	// had answered, or while such a caller had not unlocked; so the context's error alone says
	// that Redis did not answer, or refused, or that nobody was known to hold the lock. Such an error
	// also matches [ErrNotAcquired]. The caller may try again later.
	ErrLocked = lockstate.ErrLocked

	// ErrLeaseLost is matched by the cause of an ended [Lease.Context], and by the errors of
	// [Lease.Unlock], UnlockContext, Check and Downgrade, and of Do and RDo, if the lock stopped
	// being this client's before Unlock or could no longer be proved to be. Check and Downgrade
	// also return it for a lease that was unlocked. The text of a lost lease's error has the
	// lock, the token and the reason. Another process may have been in the critical section:
	// check or repeat the work, using the fencing token if the resource compares it.
	ErrLeaseLost = lockstate.ErrLeaseLost

	// ErrMaxHold is matched by the errors of a lease that ended because it was held for as
	// long as [WithMaxHold] allows. Such an error also matches [ErrLeaseLost]: work that continues
	// may overlap with another owner's.
	ErrMaxHold = lockstate.ErrMaxHold

	// ErrNotReleased is returned by Unlock and UnlockContext if Redis did not confirm the release in
	// time, and did not confirm that the lock was this client's until then. The client keeps retrying,
	// unless the error also matches [ErrClosed] or the TTL has passed: then nothing retries. The
	// error's text says by when the lock expires at the latest, where that is known. If Redis later
	// says that the lock may have been lost before Unlock, the loss handler is called.
	ErrNotReleased = lockstate.ErrNotReleased

	// ErrNoReplicas is matched by the error of LockContext, and by other errors as their last
	// error of Redis, if [WithReplicas] is set and fewer replicas have the grant than it asks
	// for. If LockContext returned it, the caller does not hold the lock, and a grant that is
	// known to be unconfirmed is being canceled. From Check and Downgrade it says nothing about the
	// lease, which goes on.
	ErrNoReplicas = protocol.ErrNoReplicas

	// ErrNoQuorum is matched by the error of LockContext, and by other errors as their last
	// error of Redis, if too few servers of a client of [NewQuorum] answered, agreed, or may
	// vote. If LockContext returned it, the caller does not hold the lock, and what the other
	// servers had granted is given back. From Check and Downgrade it says nothing about the
	// lease, which goes on. Inspect and ForceUnlock return such an error, too.
	ErrNoQuorum = quorum.ErrNoQuorum

	// ErrNotLocked is returned by [Mutex.UnlockContext], [RWMutex.UnlockContext] and RUnlockContext
	// if no caller of the client holds the lock in that mode. Unlock and RUnlock panic with an error
	// that matches it.
	ErrNotLocked = errors.New("leased: not locked by this client")

	// ErrClosed is matched by the errors of a client that was closed, or whose *redis.Client was
	// closed; the latter also match redis.ErrClosed. It is also the cause of the ended contexts of
	// leases that were held when the client was closed.
	ErrClosed = protocol.ErrClosed

	// ErrInvalidName is returned for a name that cannot be the name of a lock because it is
	// empty, is longer than 512 bytes, is not UTF-8, has control characters, has braces that
	// would put its keys into different Cluster slots, or would make its key a helper key of another
	// lock, or the mark of a quorum's server; see [Client.Mutex].
	ErrInvalidName = protocol.ErrInvalidName

	// ErrInvalidOption is returned for an option that is nil, out of range or contradicts another,
	// and for a Redis client that New or [NewQuorum] cannot use. Options are never corrected silently.
	ErrInvalidOption = errors.New("leased: invalid option")
)

var sentinels = []error{
	ErrNotAcquired, ErrLocked, ErrLeaseLost, ErrMaxHold, ErrNotReleased, ErrNoReplicas, ErrNoQuorum, ErrNotLocked, ErrClosed,
	ErrInvalidName, ErrInvalidOption,
}

// Errors for misuse. They have no sentinel, because no program can do anything about them.
// Methods that return no error panic with them.
var (
	errMutexUnmade   = errors.New("leased: Mutex was not made by Client.Mutex")
	errRWMutexUnmade = errors.New("leased: RWMutex was not made by Client.RWMutex")
	errLeaseUnmade   = errors.New("leased: Lease is nil, or was not returned by LockContext")
	errClientUnmade  = errors.New("leased: the Client is nil, or was not made by New or NewQuorum")
	errNilContext    = errors.New("leased: the context is nil")
	errNilFunc       = errors.New("leased: the function is nil")
	errLeaseOver     = errors.New("leased: the lease has ended")
)

// textError is an error that has its own text and matches other errors.
type textError struct {
	text string
	is   []error
}

func (e *textError) Error() string   { return e.text }
func (e *textError) Unwrap() []error { return e.is }

// bare returns the text of err without the package name, so that it can follow another text.
func bare(err error) string { return strings.TrimPrefix(err.Error(), "leased: ") }

// notAcquired says why a caller was not admitted. It matches ErrNotAcquired, the reason (a
// context's error, ErrLocked, ErrClosed, or an error reply of Redis), the last error of
// Redis while the caller waited, and ErrLocked if the lock was taken.
type notAcquired struct {
	name    string
	waited  time.Duration
	reason  error
	lastErr error  // last error of Redis, may be nil
	blocker string // blockerText of the client that had the lock when Redis last answered, up to 20 s before if it answers; may be empty
	minHold bool   // whether blocker has unlocked and its minimum hold keeps the lock
	here    bool   // whether a caller of this process was inside
	kept    bool   // here, and the lease of each caller inside has ended before its Unlock
	readers bool   // whether blocker is a reader, and a writer waits ahead
	taken   bool   // whether a context ended while another caller had the lock, as far as Redis had answered
	unasked bool   // whether the caller gave up before it entered the lock
	silent  bool   // whether Redis had been asked for the lock, and had not answered
}

// unanswered reports whether Redis was asked, and had told neither who has the lock nor what is wrong.
func (e *notAcquired) unanswered() bool {
	return e.silent && e.lastErr == nil && !e.here && e.blocker == ""
}

// ofContext reports whether err is the error of a context that has ended.
func ofContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

func (e *notAcquired) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "leased: lock %q not acquired", e.name)
	if e.waited >= time.Millisecond {
		fmt.Fprintf(&b, " after %v", e.waited.Round(time.Millisecond))
	}
	if e.reason != nil {
		fmt.Fprintf(&b, ": %s", bare(e.reason))
	}
	switch {
	case e.kept && !errors.Is(e.reason, ErrLocked):
		b.WriteString(" (a caller of this process whose lease has ended has not unlocked)")
	case e.here && !errors.Is(e.reason, ErrLocked):
		b.WriteString(" (held by another caller of this process)")
	case e.here:
	case e.minHold:
		fmt.Fprintf(&b, " (kept until the end of the minimum hold of %s)", e.blocker)
	case e.readers:
		fmt.Fprintf(&b, " (held by readers such as %s, and a writer waits)", e.blocker)
	case e.blocker != "":
		fmt.Fprintf(&b, " (held by %s)", e.blocker)
	case e.unanswered():
		b.WriteString(" (Redis had not answered)")
	}
	if e.lastErr != nil {
		// The texts are compared, and not the errors: a hook's error may be of a type whose values cannot be.
		if last := bare(e.lastErr); !e.tells(last) {
			fmt.Fprintf(&b, " (last Redis error: %s)", last)
		}
	}
	return b.String()
}

// tells reports whether the reason ends with the text of the last Redis error. The cause of a context's end can end
// with it by chance.
func (e *notAcquired) tells(last string) bool {
	if e.reason == nil {
		return false
	}
	text := bare(e.reason)
	return text == last || !ofContext(e.reason) && strings.HasSuffix(text, ": "+last)
}

// Unwrap includes redisserver.ErrLateAnswer if nothing was known of the lock, for "leased run".
func (e *notAcquired) Unwrap() []error {
	errs := []error{ErrNotAcquired}
	if e.unasked || e.unanswered() {
		errs = append(errs, redisserver.ErrLateAnswer)
	}
	if e.taken {
		errs = append(errs, ErrLocked)
	}
	for _, err := range []error{e.reason, e.lastErr} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// notDone is the error for what a caller wanted of a lock and did not get, and why. It matches why, and is.
func notDone(name, what string, why error, is ...error) error {
	return &textError{fmt.Sprintf("leased: lock %q not %s: %s", name, what, bare(why)), append(is, why)}
}

// leaseLost says which lease ended before its Unlock, and why. It matches ErrLeaseLost, also
// ErrMaxHold at the end of a maximum hold, and what went wrong with the release.
type leaseLost struct {
	name    string
	token   uint64
	why     lockstate.Reason
	release error // may be nil
}

func (e *leaseLost) Error() string {
	s := fmt.Sprintf("leased: lock %q lost (token %d): %s", e.name, e.token, e.why)
	if e.release != nil {
		s += "; " + bare(e.release)
	}
	return s
}

func (e *leaseLost) Unwrap() []error {
	errs := []error{ErrLeaseLost}
	if e.why == lockstate.Overlong {
		errs[0] = ErrMaxHold
	}
	if e.release != nil {
		errs = append(errs, e.release)
	}
	return errs
}

// reportsLoss reports whether err, which the work under a lease returned, already says all that the error of
// its Unlock says. Work often returns the cause of its context.
func reportsLoss(err, unlock error) bool {
	var a, b *leaseLost
	return errors.As(err, &a) && errors.As(unlock, &b) && a.name == b.name && a.token == b.token && a.why == b.why && b.release == nil
}

// notReleased says how long an unconfirmed release may keep other processes out.
type notReleased struct {
	name    string
	ends    time.Time // by when the lock expires; zero if only Redis knows
	lastErr error     // last error of Redis, may be nil
	ended   error     // the error of the context that the caller waited with; may be nil
	over    bool      // nothing is tried anymore: a client was closed, or the TTL has passed
}

func (e *notReleased) Error() string {
	s := fmt.Sprintf("leased: release of lock %q not confirmed by Redis; ", e.name)
	if !e.over {
		s += "still trying; "
	}
	s += "the lock expires"
	if e.ends.IsZero() {
		s += " with its TTL"
	} else {
		s += " by " + e.ends.Format(time.RFC3339Nano)
	}
	for _, err := range []error{e.ended, e.lastErr} {
		if err != nil {
			s += ": " + bare(err)
		}
	}
	return s
}

func (e *notReleased) Unwrap() []error {
	errs := []error{ErrNotReleased}
	for _, err := range []error{e.ended, e.lastErr} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}
