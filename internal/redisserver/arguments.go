package redisserver

import (
	"hash/maphash"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// arguments are what the commands of a server have in common, as go-redis takes it: a string in
// an interface is an allocation, and most commands repeat what an earlier one has said. What a
// slot holds is never changed, only replaced.
type arguments struct {
	inboxes any
	mark    any // the key behind those of each lock, on a server of a quorum; else nil
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
	return &arguments{inboxes: inboxes, seed: maphash.MakeSeed()}
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
