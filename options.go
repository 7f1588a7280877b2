package leased

import (
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v4"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

const (
	minTTL          = 100 * time.Millisecond
	minRetryDelay   = 5 * time.Millisecond // so that a policy without pauses does not keep a CPU and a server busy
	maxRetryDelay   = 30 * time.Second
	maxPrefixBytes  = 256
	closeWait       = 5 * time.Second
	tryLockWait     = time.Second
	defaultRelease  = time.Second
	defaultHandoffs = 64
	defaultTenure   = 10 * time.Millisecond
)

// BackOff decides how long to pause between attempts after Redis has failed. The policies
// of github.com/cenkalti/backoff/v4 satisfy it. A negative pause (backoff.Stop), or one
// longer than 30 s, counts as 30 s: a lock never stops retrying because of its policy. One
// shorter than 5 ms counts as 5 ms, because a refusal can come back within microseconds.
type BackOff interface {
	NextBackOff() time.Duration
}

// An Option configures a Client. A [LockOption] is also an Option: given to New, it sets
// the default for that client's locks.
type Option interface{ applyClient(*clientOptions) error }

// A LockOption configures one handle of a lock. Handles of one name may have different options.
type LockOption interface {
	Option
	applyLock(*lockOptions) error
}

type clientOptions struct {
	prefix string
	owner  string
	logger *slog.Logger
	onLoss func(LossEvent)

	hideNames bool // log lines do not name locks

	backOff func() BackOff
	lock    lockOptions

	replicas     int // how many must have a grant; 0: none
	replicasWait time.Duration

	quarantine time.Duration // of a quorum's servers; 0: no quorum

	tracers       trace.TracerProvider // nil: the global provider
	meters        metric.MeterProvider // nil: the global provider
	everySpan     bool
	attributes    []attribute.KeyValue     // of all spans and metrics
	lockLabel     func(name string) string // returns the label of a lock in metrics; nil: locks have none
	slow          time.Duration            // 0: slow callers are not logged
	profileLabels bool                     // whether goroutines that wait have labels
}

type lockOptions struct {
	lockstate.Terms
}

type clientOption func(*clientOptions) error

func (f clientOption) applyClient(o *clientOptions) error { return f(o) }

type lockOption func(*lockOptions) error

func (f lockOption) applyClient(o *clientOptions) error { return f(&o.lock) }
func (f lockOption) applyLock(o *lockOptions) error     { return f(o) }

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalidOption}, args...)...)
}

// WithKeyPrefix puts prefix before every key and channel, so that several applications can
// share one Redis, or so that an ACL pattern can match them. A prefix has at most 256 bytes
// of UTF-8 without control characters; for braces in it, see [Client.Mutex].
//
// All clients that share a lock need the same prefix, because messages go to channels under
// it. A key is the prefix and the name, with nothing in between: end the prefix with a
// separator, such as a colon, so that no name of one application is a key of another. Where
// keys collide, the two applications still exclude each other. But no message of one reaches the
// other: waiters lose their places at each release and notice it only at their next re-check, so
// while two processes of one application take turns, the other may not get the lock at all; a lock
// that is kept idle ([WithIdleHold]) is not given up to the other, nor do readers make room for its
// writers; and ForceUnlock does not notify the other's owner, which notices at its next renewal. The
// default is no prefix.
func WithKeyPrefix(prefix string) Option {
	return clientOption(func(o *clientOptions) error {
		switch {
		case len(prefix) > maxPrefixBytes:
			return invalid("key prefix must have at most %d bytes, got %d", maxPrefixBytes, len(prefix))
		case !utf8.ValidString(prefix):
			return invalid("key prefix %q must be UTF-8", prefix)
		}
		// A name may close an open brace; it cannot make any other bad prefix valid.
		_, err := protocol.NewKeys(prefix, "x")
		if err != nil {
			_, err = protocol.NewKeys(prefix, "x}")
		}
		if err != nil {
			// Not %w: no name was given yet, so it must not match ErrInvalidName.
			return invalid("no name is valid after the key prefix %q: %v", prefix, err)
		}
		o.prefix = prefix
		return nil
	})
}

// WithOwner sets the readable part of this client's id, which other processes see in
// Inspect, errors and traces. Labels need not be unique. A label has 1 to 128 bytes, all of
// its characters printable (no zero-width ones), and no spaces. The default is host:pid, for
// all clients of a process.
func WithOwner(label string) Option {
	return clientOption(func(o *clientOptions) error {
		if label == "" || !protocol.ValidLabel(label) {
			return invalid("owner %q must be 1 to %d bytes of printable UTF-8 without spaces", label, protocol.MaxLabelBytes)
		}
		o.owner = label
		return nil
	})
}

// WithLogger sets the logger to which the client reports errors. While all is well, it logs only what
// options ask for ([WithSlowThreshold]) and what [New] finds remarkable about the Redis client or
// [NewQuorum] about a new set of servers. Each cause is logged at most once a minute, or once for each
// outage if outages follow more quickly; but without a loss handler, every loss of a lease is logged. A
// line about a lock names the lock; see [WithoutLockNamesInLogs]. The logger is called on a separate
// goroutine, so no lock waits for it. The default is [slog.Default].
func WithLogger(logger *slog.Logger) Option {
	return clientOption(func(o *clientOptions) error {
		if logger == nil {
			return invalid("logger is nil; leave the option out for the default")
		}
		o.logger = logger
		return nil
	})
}

// WithoutLockNamesInLogs keeps the names of locks out of all log lines, in case the names
// are secrets. Errors, spans and [LossEvent] still have them. Only code of yours can bring a name in: an
// error of a hook of the Redis client is logged with its text, in which the name of the line's own lock is
// replaced. Of what code of yours panics with, only the type is logged. The default is that lines about a
// lock name it.
func WithoutLockNamesInLogs() Option {
	return clientOption(func(o *clientOptions) error {
		o.hideNames = true
		return nil
	})
}

// WithLossHandler sets the function that is called when a lease is lost, even if Redis says
// so only after Unlock has stopped waiting for it. Users of Lock and Unlock learn of a loss
// in no other way. The handler is called for one loss at a time, under no mutex of this
// package. If it blocks, 100,000 further losses are queued for it; those beyond are
// dropped, which is logged. A lease that is still held when Close has returned is not
// watched anymore: only its Unlock, or [Lease.Check], reports that it was lost. The default is to log each
// loss at level Error; losses that come together for the same reason share a line, with
// their number.
func WithLossHandler(handler func(LossEvent)) Option {
	return clientOption(func(o *clientOptions) error {
		if handler == nil {
			return invalid("loss handler is nil; leave the option out for the default")
		}
		o.onLoss = handler
		return nil
	})
}

// WithBackOff sets how long to pause after Redis has failed, from 5 ms to 30 s (see
// [BackOff]). newPolicy is called each time a lock's commands begin to fail; after a
// success the policy is dropped. Locks never share a policy. NextBackOff is called from
// several goroutines, but never concurrently on one policy. newPolicy must be safe for
// concurrent use, and is also called once by New, which refuses a function that returns
// nil. The default is the exponential policy of backoff v4 with its jitter: pauses grow from
// 25 to 75 ms at first to 10 to 30 s.
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

// WithTracerProvider sets the provider of the spans for waits and holds. Spans are ended on
// a separate goroutine. Unlock, and a call that did not get its lock, wait for that, but
// for at most 5 ms and only while the provider's span processors keep up. Close the client
// before shutting down the provider. The default is the global provider, even if it is set
// after New.
func WithTracerProvider(p trace.TracerProvider) Option {
	return clientOption(func(o *clientOptions) error {
		if isNil(p) {
			return invalid("tracer provider is nil; leave the option out for the global one")
		}
		o.tracers = p
		return nil
	})
}

// WithMeterProvider sets the provider of the instruments. Close the client before shutting down the
// provider: Close adds the last counts. The default is the global provider, even if it is set after New.
func WithMeterProvider(p metric.MeterProvider) Option {
	return clientOption(func(o *clientOptions) error {
		if isNil(p) {
			return invalid("meter provider is nil; leave the option out for the global one")
		}
		o.meters = p
		return nil
	})
}

// WithUncontendedSpans makes spans for every call of Lock, RLock and their Try forms. These
// calls have no context, and so no parent span. The default is to make spans for them only
// if they waited for another caller, if Redis failed meanwhile, if another caller waited for
// them, or if their lease did not end well.
func WithUncontendedSpans() Option {
	return clientOption(func(o *clientOptions) error {
		o.everySpan = true
		return nil
	})
}

// WithLockNameInMetrics adds the lock's name to the metrics of waits and holds, as the
// attribute leased.lock, and the key prefix, if there is one, as leased.prefix. Each name
// costs the backend additional series: a histogram has about 25 for each outcome. And the
// SDK keeps 2,000 series of an instrument, unless its WithCardinalityLimit says otherwise,
// and puts all others into one without attributes, for as long as the process lives. So use
// it only if there are few names; otherwise use [WithLockLabelInMetrics]. Spans always have
// the name. The default is to leave it out.
func WithLockNameInMetrics() Option {
	return WithLockLabelInMetrics(func(name string) string { return name })
}

// WithLockLabelInMetrics is like [WithLockNameInMetrics], but adds what label returns
// instead of the lock's name. For instance, if each thing of some kind has a lock of its
// own, label can return the kind. Locks with the same label are measured together. A lock
// with the label "" gets no attribute.
//
// label must be a function of the name alone, and safe for concurrent use. It is called
// when Mutex or RWMutex makes a handle, on the goroutine of that caller and under no mutex;
// the handle keeps the label. If label panics, the panic is logged, and the label is "". If
// both this option and WithLockNameInMetrics are given, the later one counts. The default
// is no label.
func WithLockLabelInMetrics(label func(name string) string) Option {
	return clientOption(func(o *clientOptions) error {
		if label == nil {
			return invalid("label function is nil; leave the option out for no label")
		}
		o.lockLabel = label
		return nil
	})
}

// WithAttributes adds attributes to every span and every metric of the client, such as the
// name of the tenant or shard that the client serves. A key must not be empty, must not be
// "error.type", and must not begin with "leased.", as this package's own names do.
// Further calls add to earlier ones; if attributes have the same key, the last one counts.
// The default is none.
func WithAttributes(attributes ...attribute.KeyValue) Option {
	return clientOption(func(o *clientOptions) error {
		for _, a := range attributes {
			if !a.Valid() {
				return invalid("attribute %q has no key or no value", a.Key)
			}
			if strings.HasPrefix(string(a.Key), "leased.") || a.Key == attrErrorType {
				return invalid("attribute %q is one of this package's; choose a key that is not \"error.type\" and does not begin with \"leased.\"", a.Key)
			}
		}
		o.attributes = append(slices.Clip(o.attributes), attributes...)
		return nil
	})
}

// WithSlowThreshold logs each caller that has been waiting for a lock, or holding one, for d, while it
// is still waiting or holding. A caller is logged at most once, at level Warn, with the lock's name
// (unless [WithoutLockNamesInLogs] keeps it out), the lock's owner if the caller waits, and the file
// and line of the call that waits or has locked. Its span gets the event "slow". The attribute waiting
// counts callers of this process only; [Client.Inspect] and leased ls show the queue in Redis. For each
// lock, only the caller that has waited longest and the one that has held longest are checked, and at
// most one of each is logged in a minute. Of locks that are slow at the same time, ten are named and
// the others counted; those that stay slow are named later. Of readers without a Lease, RUnlock ends
// the hold that began first, so one that is stuck among others that come and go is not seen. The line may
// come up to d/4 late, and a caller that has given up by then is not logged, so d should be well below
// callers' timeouts. d must be at least 10 ms. The metrics leased.wait.oldest and leased.hold.oldest need
// no threshold. The default is to log none.
func WithSlowThreshold(d time.Duration) Option {
	return clientOption(func(o *clientOptions) error {
		if d < 10*time.Millisecond {
			return invalid("threshold %v for slow callers must be at least 10ms", d)
		}
		o.slow = d
		return nil
	})
}

// WithProfileLabels gives each goroutine that waits for a lock profiler labels for the
// duration of the wait: leased.lock, which is the lock's name, and leased.mode. A goroutine
// profile (such as /debug/pprof/goroutine?debug=1) then shows how many goroutines wait for
// which lock. After the wait, the goroutine has the labels of the context that was given to
// LockContext or RLockContext. After a Lock or RLock that waited it has none, because the
// runtime does not tell which labels it had before. Labels are visible to anyone who may
// read profiles. The default is no labels.
func WithProfileLabels() Option {
	return clientOption(func(o *clientOptions) error {
		o.profileLabels = true
		return nil
	})
}

// isNil reports whether p is nil or holds a nil pointer, as happens when a caller passes a
// value that was never set.
func isNil(p any) bool {
	v := reflect.ValueOf(p)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// WithTTL sets the length of a lease, which is how long others wait if the owner dies. A
// lease is renewed after a third of its TTL, so the TTL bounds neither the wait nor the
// hold. Callers of one process that pass the lock on to each other, or read at the same
// time, share one grant, and its TTL is that of the caller for which Redis was asked: give
// all handles of a name in one process the same TTL. It must be at least 100 ms, at most 30
// days, and in whole milliseconds; on a quorum it must not exceed the time of
// [WithQuarantine]. The default is 30 s.
func WithTTL(ttl time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if ttl < minTTL || ttl > protocol.MaxTTL || ttl%time.Millisecond != 0 {
			return invalid("TTL %v must be whole milliseconds between %v and %v", ttl, minTTL, protocol.MaxTTL)
		}
		o.TTL = ttl
		return nil
	})
}

// WithMaxHold bounds how long one lease is held. After d the lease's context ends with
// [ErrMaxHold], which is an [ErrLeaseLost], and the lease is no longer renewed, so a stuck
// holder keeps other processes out for at most one more TTL. While other readers of its
// process hold the lock, that TTL begins when the last of them unlocks. Other callers of
// its own process wait for its Unlock, as they do after any loss. RUnlock ends the hold that
// began first, whoever calls it, so a bound for a single reader needs RLockContext. d is measured
// on this machine's monotonic clock, which stands still while the machine sleeps. It must not be
// negative. The default is 0, which means no bound.
func WithMaxHold(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d < 0 {
			return invalid("maximum hold %v is negative", d)
		}
		o.MaxHold = d
		return nil
	})
}

// WithMinHold keeps anybody from getting the lock for d after a writer got it, however soon that writer
// unlocks. It is for work that must be done at most once in d, such as cron jobs on machines whose
// clocks differ. Unlock returns as usual, without waiting. Redis then keeps the lock, owned by nobody,
// until d is over, even if this process has ended by then; after that the next waiter gets it. Callers
// of this process wait like callers of others: before d is over, a lease with a minimum hold is not
// handed on inside the process, and no idle hold begins.
//
// d begins when the caller gets the lock. It is measured on this machine's monotonic clock until
// Unlock, and on Redis's clock from then on: from the arrival of the release, so a Redis that hangs while
// the release is on its way keeps the lock longer by that time. d may be longer than the TTL.
//
// The minimum hold applies to leases that are unlocked. If the process dies, or closes its client
// without Unlock, the lock is free when the TTL ends, as without this option. The same is true if Redis
// cannot be reached from Unlock until the TTL ends, and if a failover undoes the Unlock. A TTL of d
// covers these cases, unless the failover loses the grant as well. Its price is that a crash in the
// middle of the work keeps the lock for up to d from then on.
//
// After Unlock, the lock is free at once if Redis forgets it, because it restarts without its data or
// evicts the key, or on FLUSHALL. ForceUnlock frees the lock at once, too. On a quorum, a server that
// restarted without its data has forgotten the minimum hold, and votes again once the time of
// [WithQuarantine] is over, so the lock may become free earlier.
//
// If the caller's context ends just as it gets the lock, so that LockContext returns an error, there is
// no minimum hold. Readers have none, and Downgrade ends that of its lease. A maximum hold must not be
// shorter than d.
//
// d must be in whole milliseconds, at most 30 days. The default is 0, which means none.
func WithMinHold(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d < 0 || d > protocol.MaxTTL || d%time.Millisecond != 0 {
			return invalid("minimum hold %v must be whole milliseconds between 0 and %v", d, protocol.MaxTTL)
		}
		o.MinHold = d
		return nil
	})
}

// WithIdleHold lets the process keep the lock for d after the last Unlock if no other
// process wants it, so that the next local Lock costs no round trip. Another process that
// wants the lock, even if it only tries, asks for it with a message, and gets the lock as
// soon as the message arrives. If a caller is inside, such a try fails after 50 ms
// and four round trips. If the message is lost, a waiter's next re-check asks again. The option applies to
// a grant that was requested by a caller with this option, and that was last unlocked by one, whose d
// counts.
//
// While Redis's clock is behind the lock's last token, because the clock was set back, each writer's
// lease needs a token from Redis. So idle holds and local hand-offs of writers save no round trip until
// the clock has caught up.
//
// An Unlock after which the process keeps the lock returns nil without asking Redis. If the
// lock was lost before, and no renewal has said so yet, nobody is told: call [Lease.Check]
// before Unlock where that matters.
//
// d must be from 0 to 30 days. The default is 0.
func WithIdleHold(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d < 0 || d > protocol.MaxTTL {
			return invalid("idle hold %v must be between 0 and %v", d, protocol.MaxTTL)
		}
		o.IdleHold = d
		return nil
	})
}

// WithLocalHandoffs bounds how long one process may pass the lock among its own callers
// while another process waits. It bounds writers only: readers that arrive once another process
// is known to wait are not admitted at all. Leases and time count from when the
// process got the lock, or last began to use it again after keeping it idle. Once another
// process waits, at most n leases are admitted in all, and none after tenure; then the lock
// goes to the other process. As with [WithTTL], the values are those of the caller for which Redis was
// asked. n must be at least 1, and tenure must not be negative. The default is 64 leases and 10 ms.
func WithLocalHandoffs(n int, tenure time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if n < 1 || tenure < 0 {
			return invalid("local hand-offs %d must be at least 1, tenure %v not negative", n, tenure)
		}
		o.Handoffs, o.Tenure = n, tenure
		return nil
	})
}

// WithReleaseTimeout bounds how long Unlock waits for Redis to confirm the release. After
// d, Unlock returns [ErrNotReleased], and the client keeps retrying in the background. The
// option has no effect on the UnlockContext methods. d must be positive. The default is
// 1 s.
func WithReleaseTimeout(d time.Duration) LockOption {
	return lockOption(func(o *lockOptions) error {
		if d <= 0 {
			return invalid("release timeout %v must be positive", d)
		}
		o.ReleaseTimeout = d
		return nil
	})
}

// WithReplicas makes a lease count only when n replicas have it too, so that it is not lost
// with its primary. Redis replicates asynchronously; without this option, a lease that was
// granted just before a failover may be granted again to another process. WAIT confirms
// grants, including those made by another process's release, and renewals. It waits for the
// replicas for at most timeout, which must be in whole milliseconds, from 1 ms to 1 s, and
// shorter than the Redis client's ReadTimeout, by more than a round trip.
//
// If fewer than n replicas confirm a grant, it is canceled. LockContext then tries again
// until its context ends, and returns an error that matches [ErrNoReplicas]; TryLockContext
// returns such an error at once. A renewal that they do not confirm does not prolong the
// lease. A lock costs no additional round trips, except for one if another process handed
// it over, or if the process passed it on to itself in the other mode. Each grant takes as long as the
// replication to the n'th replica.
//
// WAIT makes loss unlikely, not impossible: the replica that is promoted need not be one of
// those counted. Set n to at least half of the replicas, and check tokens at the resource.
// Replicas of a replica do not count. Each grant uses a connection of the Redis client until
// it is confirmed. A client uses at most half of the pool in this way at once, so give it a
// PoolSize of 2 or more, and as docs/deployments.md says for many grants a second.
// The option is for [New] only. The default is no confirmation.
func WithReplicas(n int, timeout time.Duration) Option {
	return clientOption(func(o *clientOptions) error {
		if n < 1 {
			return invalid("replicas %d must be at least 1", n)
		}
		if timeout < time.Millisecond || timeout > time.Second || timeout%time.Millisecond != 0 {
			return invalid("timeout %v for replicas must be whole milliseconds between 1 ms and 1 s", timeout)
		}
		o.replicas, o.replicasWait, o.lock.Confirm = n, timeout, true
		return nil
	})
}

// newClientOptions combines the defaults with opts and checks the result.
func newClientOptions(opts []Option) (clientOptions, error) {
	o := clientOptions{
		owner:   defaultOwner(),
		logger:  nil, // slog.Default() at the time of use
		backOff: defaultBackOff,
		lock: lockOptions{
			Terms: lockstate.Terms{TTL: protocol.DefaultTTL, Handoffs: defaultHandoffs, Tenure: defaultTenure, ReleaseTimeout: defaultRelease},
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
	return o, o.lock.contradiction()
}

// contradiction returns an error if two options contradict each other.
func (o *lockOptions) contradiction() error {
	if o.MaxHold > 0 && o.MinHold > o.MaxHold {
		return invalid("minimum hold %v is longer than the maximum hold %v", o.MinHold, o.MaxHold)
	}
	return nil
}

// with returns o as changed by a handle's options.
func (o lockOptions) with(opts []LockOption) (lockOptions, error) {
	for _, opt := range opts {
		if opt == nil {
			return o, invalid("a nil option")
		}
		if err := opt.applyLock(&o); err != nil {
			return o, err
		}
	}
	return o, o.contradiction()
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
	return protocol.Label(fmt.Sprintf("%s:%d", host[:min(len(host), protocol.MaxLabelBytes-12)], os.Getpid())) // without a rune that was cut
}
