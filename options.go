package leased

import (
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v4"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

const (
	minTTL          = 100 * time.Millisecond
	maxTTL          = 30 * 24 * time.Hour
	maxRetryDelay   = 30 * time.Second
	maxOwnerBytes   = 128
	maxPrefixBytes  = 256
	closeWait       = 5 * time.Second
	tryLockWait     = time.Second
	commandTimeout  = 2 * time.Second
	longestTenure   = time.Second // pace of hand-overs that nobody was heard to want
	defaultTTL      = 30 * time.Second
	defaultRelease  = time.Second
	defaultHandoffs = 64
	defaultTenure   = 10 * time.Millisecond
)

// BackOff decides the pauses between attempts after Redis failed. The policies
// of github.com/cenkalti/backoff/v4 satisfy it. A negative pause (backoff.Stop)
// and any longer than 30 s counts as 30 s: a lock does not give up on its own.
type BackOff interface {
	NextBackOff() time.Duration
}

// Option configures a Client. Each [LockOption] given to New is also an Option:
// the default of that client's locks.
type Option interface{ applyClient(*clientOptions) error }

// LockOption configures one handle of a lock. Handles of one name may differ.
type LockOption interface {
	Option
	applyLock(*lockOptions) error
}

type clientOptions struct {
	prefix  string
	owner   string
	logger  *slog.Logger
	onLoss  func(LossEvent)
	backOff func() BackOff
	lock    lockOptions

	tracers       trace.TracerProvider // nil: the global one
	meters        metric.MeterProvider // likewise
	everySpan     bool
	nameInMetrics bool
}

type lockOptions struct {
	ttl            time.Duration
	maxHold        time.Duration // 0: none
	idleHold       time.Duration
	releaseTimeout time.Duration
	handoffs       int
	tenure         time.Duration
}

type clientOption func(*clientOptions) error

func (f clientOption) applyClient(o *clientOptions) error { return f(o) }

type lockOption func(*lockOptions) error

func (f lockOption) applyClient(o *clientOptions) error { return f(&o.lock) }
func (f lockOption) applyLock(o *lockOptions) error     { return f(o) }

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalidOption}, args...)...)
}

// WithKeyPrefix puts prefix before every key and channel, so that several
// applications, or an ACL pattern, can share one Redis. At most 256 bytes, and
// with braces only as one Redis Cluster hash tag, or the beginning of one.
// The default is no prefix.
func WithKeyPrefix(prefix string) Option {
	return clientOption(func(o *clientOptions) error {
		if len(prefix) > maxPrefixBytes || !utf8.ValidString(prefix) {
			return invalid("key prefix must be UTF-8 of at most %d bytes, got %d bytes", maxPrefixBytes, len(prefix))
		}
		// An open brace may be closed by the names; nothing else can be mended by them.
		_, err := newKeys(prefix, "x")
		if err != nil {
			_, err = newKeys(prefix, "x}")
		}
		if err != nil {
			return invalid("no name is valid after the key prefix %q: %v", prefix, err) //nolint:errorlint // of no name yet
		}
		o.prefix = prefix
		return nil
	})
}

// WithOwner sets the readable part of this client's id, which Inspect, errors
// and traces of other processes show. At most 128 bytes, printable, no spaces.
// The default is host:pid.
func WithOwner(label string) Option {
	return clientOption(func(o *clientOptions) error {
		if label == "" || len(label) > maxOwnerBytes || ownerLabel(label) != label {
			return invalid("owner %q must be 1 to %d bytes of printable UTF-8 without spaces", label, maxOwnerBytes)
		}
		o.owner = label
		return nil
	})
}

// WithLogger sets where the client reports errors. Nothing is logged while there are
// none, and at most one line a minute for each cause, except that every lost lease is
// logged if there is no loss handler. Lock names are logged at level Debug only. The
// logger is called on a goroutine of its own, so no lock waits for it. The default is
// [slog.Default].
func WithLogger(logger *slog.Logger) Option {
	return clientOption(func(o *clientOptions) error {
		if logger == nil {
			return invalid("logger is nil; leave the option out for the default")
		}
		o.logger = logger
		return nil
	})
}

// WithLossHandler sets what is called when a lease is lost, which users of
// Lock and Unlock learn in no other way. Calls come one at a time, and under no mutex
// of this package. The default logs at level Error.
func WithLossHandler(handler func(LossEvent)) Option {
	return clientOption(func(o *clientOptions) error {
		if handler == nil {
			return invalid("loss handler is nil; leave the option out for the default")
		}
		o.onLoss = handler
		return nil
	})
}

// WithBackOff sets how long to pause after Redis failed. newPolicy is called
// for each lock in trouble, never shared. The default is backoff v4's
// exponential policy from 50 ms to 30 s, jittered.
func WithBackOff(newPolicy func() BackOff) Option {
	return clientOption(func(o *clientOptions) error {
		if newPolicy == nil {
			return invalid("back-off factory is nil; leave the option out for the default")
		}
		if isNil(newPolicy()) {
			return invalid("the back-off factory returned nil")
		}
		o.backOff = newPolicy
		return nil
	})
}

// isNil is for interfaces, which an option left out upstream fills with a nil pointer.
func isNil(p any) bool {
	v := reflect.ValueOf(p)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// WithTTL sets the lease's length: how long others wait when the owner dies.
// The watchdog extends it at a third of its length, so it bounds neither the
// wait nor the hold. At least 100 ms, at most 30 days, whole milliseconds. The
// default is 30 s.
func WithTTL(ttl time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if ttl < minTTL || ttl > maxTTL || ttl%time.Millisecond != 0 {
			return invalid("TTL %v must be whole milliseconds between %v and %v", ttl, minTTL, maxTTL)
		}
		o.ttl = ttl
		return nil
	})
}

// WithMaxHold bounds how long one lease is held: after d its context ends with
// ErrLeaseLost and it is no longer renewed, so a stuck holder keeps others out for at
// most one more TTL. 0 means no bound, which is the default.
func WithMaxHold(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d < 0 {
			return invalid("maximum hold %v is negative", d)
		}
		o.maxHold = d
		return nil
	})
}

// WithIdleHold lets the process keep the lock for d after the last Unlock if
// no other process wants it, so that the next local Lock costs no round trip. A process
// that wants it, also one that only tries, asks for it by a message and gets it as soon
// as that arrives; if the lock is in use, a try waits 50 ms in vain. If the message is
// lost, a waiter's next re-check asks again. It counts for a grant that was asked for by
// a caller with this option. The default is 0.
func WithIdleHold(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d < 0 || d > maxTTL {
			return invalid("idle hold %v must be between 0 and %v", d, maxTTL)
		}
		o.idleHold = d
		return nil
	})
}

// WithLocalHandoffs bounds how long one process may pass the lock among its own
// callers while another process waits: at most n leases, and none begins after
// tenure. The default is 64 leases and 10 ms.
func WithLocalHandoffs(n int, tenure time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if n < 1 || tenure < 0 {
			return invalid("local hand-offs %d must be at least 1, tenure %v not negative", n, tenure)
		}
		o.handoffs, o.tenure = n, tenure
		return nil
	})
}

// WithReleaseTimeout bounds how long Unlock waits for Redis to confirm. The
// default is 1 s.
func WithReleaseTimeout(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d <= 0 {
			return invalid("release time-out %v must be positive", d)
		}
		o.releaseTimeout = d
		return nil
	})
}

func newClientOptions(opts []Option) (clientOptions, error) {
	o := clientOptions{
		owner:   defaultOwner(),
		logger:  nil, // slog.Default() at the time of use
		backOff: defaultBackOff,
		lock: lockOptions{
			ttl:            defaultTTL,
			releaseTimeout: defaultRelease,
			handoffs:       defaultHandoffs,
			tenure:         defaultTenure,
		},
	}
	for _, opt := range opts {
		if opt == nil {
			return o, invalid("a nil option")
		}
		if err := opt.applyClient(&o); err != nil {
			return o, err
		}
	}
	return o, nil
}

// with returns o as the handle's options change it.
func (o lockOptions) with(opts []LockOption) (lockOptions, error) {
	for _, opt := range opts {
		if opt == nil {
			return o, invalid("a nil option")
		}
		if err := opt.applyLock(&o); err != nil {
			return o, err
		}
	}
	return o, nil
}

func defaultBackOff() BackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMaxInterval(20*time.Second), // jitter adds up to a half
		backoff.WithMaxElapsedTime(0),
	)
}

func defaultOwner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return ownerLabel(fmt.Sprintf("%.*s:%d", maxOwnerBytes-12, host, os.Getpid()))
}

// ownerLabel drops what may not be part of a request's id: ids are fields of
// messages that are separated by spaces.
func ownerLabel(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
}
