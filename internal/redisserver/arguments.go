package redisserver

import (
	"hash/maphash"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// arguments caches the arguments that a server's commands share, in the form that go-redis takes.
// Storing a string in an interface allocates, and most commands repeat the arguments of an earlier
// one. The value in a slot is never modified, only replaced.
type arguments struct {
	inboxes any
	waits   [5]any     // what how returns; not used on a quorum's server, where the argument differs per request
	links   any        // the links argument of a release without a span
	mark    any        // on a quorum's server, the key that follows the keys of each lock; else nil
	spare   *sync.Pool // of *[maxLine]any, for reuse; nil if somebody may keep a command's arguments
	seed    maphash.Seed
	locks   [64]atomic.Pointer[keysArgument]     // indexed by a hash of the lock's own key
	times   [13]atomic.Pointer[durationArgument] // indexed by the milliseconds; a client has few TTLs
}

type keysArgument struct {
	lock string
	all  [6]any
	n    int // how many there are
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

// how returns the argument of acquire that says how to wait: 0 means not at all, 1 means to wait,
// 2 means to wait under an id that was never sent before, and 4 that an owner asks; on a quorum's
// server the ticket follows this digit. 3 means a brief re-check, which is never sent to a quorum's
// server. The new end of the waiting lease follows, then + and by how much that is later than the
// present end. The argument ends with the prefix of the inbox channels.
func (a *arguments) how(c *protocol.Command) any {
	wait := 0
	switch {
	case c.Question:
		wait = 4
	case c.Wait && c.First:
		wait = 2
	case c.Wait:
		wait = 1
	}
	if a.mark == nil && c.Until == 0 {
		return a.waits[wait]
	}
	all := make([]byte, 0, 64)
	if a.mark != nil {
		all = strconv.AppendUint(append(all, '0'+byte(wait)), c.Ticket, 10)
	} else {
		all = strconv.AppendUint(append(all, '3'), c.Until, 10)
		all = strconv.AppendUint(append(all, '+'), c.Until-c.Waits, 10)
	}
	all = append(all, ' ')
	return string(append(all, a.inboxes.(string)...))
}

// acquire returns the line of acquire, except for the mark that a quorum's server is told, for which
// there is room.
func (a *arguments) acquire(k *protocol.Keys, c *protocol.Command) []any {
	all := append(a.newLine(k), c.ID, a.milliseconds(c.TTL), a.how(c))
	switch {
	case c.Told > 0:
		all = append(all, c.Echo, c.Own, decimal(c.Told))
	case c.Own != "":
		all = append(all, c.Echo, c.Own)
	case c.Echo != "" || c.Question: // the shortcuts give a free lock to whoever has no more arguments
		all = append(all, c.Echo)
	}
	return all
}

// release returns the line of release and of cancel. Its arguments are the id, the span followed by the
// prefix of the inbox channels and, where they are needed, the last token and a cool-down.
func (a *arguments) release(k *protocol.Keys, id string, last uint64, link *protocol.Span, cooldown time.Duration) []any {
	links := a.links
	if link != nil {
		links = protocol.FormatSpan(link) + " " + a.inboxes.(string)
	}
	all := append(a.newLine(k), id, links)
	if last > 0 || cooldown > 0 {
		all = append(all, decimal(last))
	}
	return withCooldown(cooldown, all...)
}

// maxLine is how many places the line of an acquire, a release or a cancel takes at most.
const maxLine = 16

// newLine returns a line with the keys of a lock, and room for the arguments.
func (a *arguments) newLine(k *protocol.Keys) []any {
	var line *[maxLine]any
	if a.spare != nil {
		line, _ = a.spare.Get().(*[maxLine]any)
	}
	if line == nil {
		line = new([maxLine]any)
	}
	keys := a.keys(k)
	line[2] = len(keys)
	return append(line[:firstKey], keys...)
}

// recycle takes back a line of newLine whose command was answered. Nobody refers to the command then,
// unless the recorder of redis.SetOTelRecorder, which go-redis calls for each command, keeps what it is
// shown.
func (a *arguments) recycle(line []any) {
	if a.spare == nil || cap(line) != maxLine {
		return
	}
	all := (*[maxLine]any)(line[:maxLine])
	clear(all[:])
	a.spare.Put(all)
}

// keys returns the keys of a lock in the order that the scripts expect, followed by a quorum's mark
// if there is one. They are cached because locking and unlocking a lock needs them at least twice.
// Callers must not modify the slice.
func (a *arguments) keys(k *protocol.Keys) []any {
	slot := &a.locks[maphash.String(a.seed, k.Lock)%uint64(len(a.locks))]
	found := slot.Load()
	if found == nil || found.lock != k.Lock {
		found = &keysArgument{lock: k.Lock, n: 5}
		all := k.All()
		copy(found.all[:], all[:])
		if a.mark != nil {
			found.all[5], found.n = a.mark, 6
		}
		slot.Store(found)
	}
	return found.all[:found.n:found.n]
}

// milliseconds formats d in milliseconds.
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
