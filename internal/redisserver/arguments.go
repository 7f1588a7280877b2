package redisserver

import (
	"hash/maphash"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// arguments are what the commands of a server have in common, as go-redis takes it: a string in
// an interface is an allocation, and most commands repeat what an earlier one has said. What a
// slot holds is never changed, only replaced.
type arguments struct {
	inboxes any
	waits   [3]any // what how returns; on a server of a quorum it is another for each request
	links   any    // of a release without a span
	mark    any    // the key behind those of each lock, on a server of a quorum; else nil
	seed    maphash.Seed
	locks   [64]atomic.Pointer[keysArgument]     // by a hash of the lock's own key
	times   [13]atomic.Pointer[durationArgument] // by the number of milliseconds: a client has few TTLs
}

type keysArgument struct {
	lock string
	all  []any
}

type durationArgument struct {
	d    time.Duration
	text any
}

func newArguments(inboxes string) *arguments {
	a := &arguments{inboxes: inboxes, links: protocol.NoSpan + " " + inboxes, seed: maphash.MakeSeed()}
	for i := range a.waits {
		a.waits[i] = string(rune('0'+i)) + " " + inboxes
	}
	return a
}

// how returns the argument of acquire that says how to wait: 0 not at all, 2 under an id that
// was never sent before. It ends with the prefix of inbox channels, and for one of a quorum's servers
// it has the ticket.
func (a *arguments) how(c *protocol.Command) any {
	wait := 0
	switch {
	case c.Wait && c.First:
		wait = 2
	case c.Wait:
		wait = 1
	}
	if a.mark == nil {
		return a.waits[wait]
	}
	all := make([]byte, 0, 64)
	all = append(all, '0'+byte(wait))
	all = strconv.AppendUint(all, c.Ticket, 10)
	all = append(all, ' ')
	return string(append(all, a.inboxes.(string)...))
}

// acquire returns the arguments of acquire but for the mark that a quorum's server is told, for
// which there is room.
func (a *arguments) acquire(c *protocol.Command) []any {
	args := append(make([]any, 0, 7), c.ID, a.milliseconds(c.TTL), a.how(c))
	switch {
	case c.Told > 0:
		args = append(args, c.Echo, c.Own, decimal(c.Told))
	case c.Own != "":
		args = append(args, c.Echo, c.Own)
	case c.Echo != "":
		args = append(args, c.Echo)
	}
	return args
}

// release returns the arguments of release and of cancel: the span, and behind it the prefix of
// inbox channels, and as far as they are needed the last token and a cool-down.
func (a *arguments) release(id string, last uint64, link *protocol.Span, cooldown time.Duration) []any {
	links := a.links
	if link != nil {
		links = protocol.FormatSpan(link) + " " + a.inboxes.(string)
	}
	switch {
	case cooldown > 0:
		return withCooldown(cooldown, id, links, decimal(last))
	case last > 0:
		return []any{id, links, decimal(last)}
	}
	return []any{id, links}
}

// keys returns the keys of a lock in the order that the scripts expect, with a quorum's mark behind
// them if there is one. A lock that is locked and unlocked needs them twice at least. The slice is
// not to be written to.
func (a *arguments) keys(k *protocol.Keys) []any {
	slot := &a.locks[maphash.String(a.seed, k.Lock)%uint64(len(a.locks))]
	found := slot.Load()
	if found == nil || found.lock != k.Lock {
		all := k.All()
		if found = (&keysArgument{k.Lock, all[:]}); a.mark != nil {
			found.all = append(found.all, a.mark)
		}
		slot.Store(found)
	}
	return found.all
}

// milliseconds formats d.
func (a *arguments) milliseconds(d time.Duration) any {
	slot := &a.times[uint64(d.Milliseconds())%uint64(len(a.times))]
	found := slot.Load()
	if found == nil || found.d != d {
		found = &durationArgument{d, Milliseconds(d)}
		slot.Store(found)
	}
	return found.text
}

// spanArgument formats a span.
func spanArgument(s *protocol.Span) any {
	if s == nil {
		return protocol.NoSpan
	}
	return protocol.FormatSpan(s)
}
