package leased

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// Info is the state of a lock in Redis at one instant.
type Info struct {
	Name    string
	Owners  []Owner  // one writer, or any number of readers; empty if the lock is free
	Waiting []Waiter // in the order in which they will be served; the first 1,000

	// Queue is the number of waiting processes. One that has died is counted, and is in Waiting, until a TTL
	// after it last asked, or for longer if Redis's clock was set back since. Redis does not know of callers who
	// wait for another caller of their own process, so those who wait inside the owner's process are neither in
	// Queue nor in Waiting.
	Queue int

	// Token is the last fencing token that Redis, or any server of a quorum, knows; 0 if none.
	Token uint64

	// Only for [NewQuorum]: how many servers there are, how many of them answered, and how
	// many of those name the owner. An owner that is named by fewer than a majority of all
	// servers need not own the lock: it may have lost the lock, or not have got it yet.
	Servers, Answered, Behind int
}

// Owner is a process that owns a lock.
type Owner struct {
	Client string // its label, see [WithOwner]; empty for a foreign owner
	Shared bool   // whether it is a reader

	// TTL is the time until the lock expires unless it is renewed; negative if it never expires.
	TTL time.Duration

	// Since is when it became the owner, or for a downgraded writer when it became the writer,
	// by Redis's clock; zero for any other reader, for a foreign owner, and for a downgraded writer if that
	// clock has been set back since. If Unlocked, and callers of the owner's process had passed the lock on,
	// it may be the time of the unlock, and Token the last caller's.
	Since time.Time

	// Token is the grant's token, or for a downgraded writer its token as a writer; 0 for any other reader
	// and a foreign owner. See [Client.Inspect] for a quorum.
	Token uint64

	// Unlocked is whether it has unlocked already. The lock is then kept from all others for
	// TTL, until the owner's [WithMinHold] is over.
	Unlocked bool

	Value string // the value of the lock's key; only for foreign owners and later versions; `""` if it is empty
}

// Waiter is a process that waits for a lock.
type Waiter struct {
	Client string // its label, see [WithOwner]; empty if the entry is not one of ours
	Shared bool   // whether it waits for reading
}

// Inspect returns what Redis knows about a lock. It acquires nothing and changes nothing,
// and the lock need not exist. It does not retry, except once if its connection had been closed or
// led to a replica, and waits for the answer until ctx ends, or until the Redis client's own
// timeouts have passed if that is sooner. The error matches
// [ErrClosed] or [ErrInvalidName], or is the error of Redis, of its client, or of ctx.
//
// On a quorum, Inspect asks all servers and returns the owner that most of them name; of two that equally
// many name, it returns a writer rather than readers, and a foreign owner last. If fewer than a majority
// answer, the error matches [ErrNoQuorum] and says how many did. Each server issues a token of its own,
// from its clock, and the lease has the greatest of those that its owner knew when a majority had granted
// it. Owner.Token is that token, or is less by as much as the servers' clocks differ. A server that
// restarts without its data grants the lease anew when it is renewed. Once every server of that majority
// has done so or does not answer, nothing in Redis tells the first grant: then Owner.Token may be greater,
// and Owner.Since too late. Otherwise the token is never greater. Of readers, Owners includes each that
// would have a majority, supposing that every server that did not answer had granted it. Inspect waits at
// most 2 s for a server that does not answer; ForceUnlock, which asks the servers twice, at most 4 s.
func (c *Client) Inspect(ctx context.Context, name string) (Info, error) {
	k, err := c.operate(ctx, "inspecting lock %q", name)
	if err != nil {
		return Info{}, err
	}
	began := c.metrics.startTiming(ctx)
	s, err := ask(ctx, c, func() (protocol.Snapshot, error) { return c.server.Inspect(ctx, &k) })
	c.metrics.recordCommand(ctx, commandInspect, began.elapsed(), failureOf(err))
	if err != nil {
		return Info{}, fmt.Errorf("leased: inspecting lock %q: %w", name, c.unlessEnded(ctx, err))
	}
	return infoOf(name, &s), nil
}

// ForceUnlock evicts the owners of the lock, including foreign ones, and lets the next waiter in. Owners
// that use this package are notified at once, and the contexts of their leases end with [ErrLeaseLost]. But
// the owners may still be at work, so ForceUnlock is for operators who know that the owner is gone or
// wrong. It deletes any string under the lock's key, whatever wrote it. A free lock is not an error.
// ForceUnlock evicts at most once, and waits for the answer as Inspect does; what was sent before ctx ended
// can still be carried out after that. The error matches [ErrClosed] or [ErrInvalidName], or is the error
// of Redis, of its client, or of ctx. After one of the latter three, the owners may have been evicted
// nevertheless. Trying again is harmless, except that it may evict the next owner.
//
// ForceUnlock returns on how many servers the lock had an owner, or 0 if nobody was evicted: the lock was
// free, the owner has unlocked it meanwhile (on a quorum, another one may own it by now), or there is an
// error. Without a quorum, it is 1 at most, and otherwise up to the number of servers that had answered by
// then.
//
// On a quorum, a nil error means that no owner is left that can have a majority. If too few servers answered
// or evicted their owner, the error matches [ErrNoQuorum], and says on how many the owners were evicted. The
// owners keep the lock unless these were enough to end their majority.
func (c *Client) ForceUnlock(ctx context.Context, name string) (evicted int, err error) {
	k, err := c.operate(ctx, "unlocking lock %q by force", name)
	if err != nil {
		return 0, err
	}
	began := c.metrics.startTiming(ctx)
	evicted, err = ask(ctx, c, func() (int, error) { return c.server.Evict(ctx, &k) })
	c.metrics.recordCommand(ctx, commandEvict, began.elapsed(), failureOf(err))
	if err != nil {
		return 0, fmt.Errorf("leased: unlocking lock %q by force: %w", name, c.unlessEnded(ctx, err))
	}
	return evicted, nil
}

// ask returns what f returns, which asks Redis under ctx, or the error of ctx if that ends before. go-redis
// heeds the deadline of a context while it waits for an answer, but not its cancellation, so f runs in a
// goroutine of its own if ctx can be canceled. That goroutine is owned by the client, ended with the answer
// or the timeouts of the Redis client, and waited for by Shutdown. A quorum has such goroutines itself.
//
// If a hook of the Redis client panics in f, so does ask. A goroutine that a hook ends is not that of the
// caller, who gets an error.
func ask[T any](ctx context.Context, c *Client, f func() (T, error)) (val T, err error) {
	if c.quorum != nil || ctx.Done() == nil {
		return f()
	}
	if ctx.Err() != nil {
		return val, c.ended(ctx)
	}
	type result struct {
		val      T
		err      error
		returned bool
		panics   any
	}
	results := make(chan result, 1)
	var decided atomic.Bool // whether f has returned in time, or ctx has ended before that
	started := c.group.start(func() {
		var r result
		defer func() {
			if !r.returned {
				r.panics = recover()
			}
			if decided.CompareAndSwap(false, true) {
				results <- r
			} else if r.panics != nil {
				c.logPanic("a hook of the Redis client", r.panics)
			}
		}()
		r.val, r.err = f()
		r.returned = true
	})
	if !started {
		return val, &textError{bare(ErrClosed), []error{ErrClosed}}
	}
	var r result
	select {
	case r = <-results:
	case <-ctx.Done():
		if decided.CompareAndSwap(false, true) {
			return val, c.ended(ctx)
		}
		r = <-results
	}
	switch {
	case r.panics != nil:
		panic(r.panics)
	case !r.returned:
		return val, errGoexit
	}
	return r.val, r.err
}

// failureOf classifies the error of ask. If a context has ended, the command had no answer, whatever the
// context's cause says.
func failureOf(err error) *protocol.Failure {
	if of := new(contextEnded); errors.As(err, &of) {
		err = of.err
	}
	return redisserver.Classify(err)
}

var errGoexit = errors.New("a hook of the Redis client ended the goroutine that asked Redis")

// unlessEnded returns err, or if ctx has ended an error that also matches what ctx ended with and
// its cause. The error of a command need not match them, because most commands are sent under a
// context that is not the user's. What err matches already is not said again. A cause of this package's own
// is not matched, see contextEnded.
func (c *Client) unlessEnded(ctx context.Context, err error) error {
	if errors.As(err, new(*contextEnded)) {
		return err
	}
	end, cause := ctx.Err(), context.Cause(ctx)
	if end == nil {
		if deadline, ok := ctx.Deadline(); !ok || time.Now().Before(deadline) {
			return err
		}
		end, cause = context.DeadlineExceeded, context.DeadlineExceeded // the connection's deadline, which is the same, came first
	}
	if !errors.Is(end, cause) && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", &causeOfEnd{cause}, err)
	}
	if !errors.Is(err, end) {
		err = fmt.Errorf("%w: %w", end, err)
	}
	return c.orClosed(err, cause)
}

// operate returns the keys of a lock that an operator names. doing, with %q for the name, is for the
// error.
func (c *Client) operate(ctx context.Context, doing, name string) (protocol.Keys, error) {
	refused := func(why error) (protocol.Keys, error) {
		return protocol.Keys{}, &textError{fmt.Sprintf("leased: "+doing+": %s", name, bare(why)), []error{why}}
	}
	switch {
	case c.unmade():
		return protocol.Keys{}, errClientUnmade
	case ctx == nil:
		return refused(errNilContext)
	case c.closes():
		return refused(ErrClosed)
	}
	return protocol.NewKeys(c.opts.prefix, name)
}

// infoOf parses a snapshot. Anything that can write to Redis may have written it, so infoOf does not assume
// that any part of it is well-formed.
func infoOf(name string, s *protocol.Snapshot) Info {
	waiting, number := s.Waiting()
	granted, _ := protocol.ParseMeta(s.Meta)
	info := Info{Name: name, Owners: ownersOf(s), Queue: number, Token: max(granted, s.Last), Servers: s.Servers, Answered: s.Answered, Behind: s.Behind}
	for _, request := range waiting {
		w := Waiter{}
		if id, err := protocol.ParseID(request); err == nil {
			w = Waiter{Client: id.Label, Shared: id.Mode == protocol.Shared}
		}
		info.Waiting = append(info.Waiting, w)
	}
	return info
}

// ownersOf returns the lock's owners.
func ownersOf(s *protocol.Snapshot) (owners []Owner) {
	for _, o := range s.Owners() {
		owners = append(owners, Owner(o))
	}
	return owners
}

// blockerName returns the readable part of the value that a caller found in the lock's key, or
// "" if the value does not say who the owner is.
func blockerName(value string) string {
	id, ok := protocol.OwnerOf(value)
	switch {
	case value == "" || value == protocol.MarkerValue:
		return ""
	case ok:
		return id.Label
	case protocol.NewerFormat(value):
		return "a later version of leased"
	}
	return "a client of another library"
}

// blockerText is blockerName for a sentence, in which the label of a client is quoted.
func blockerText(value string) string {
	if id, ok := protocol.OwnerOf(value); ok && id.Label != "" {
		return strconv.Quote(id.Label)
	}
	return blockerName(value)
}
