// Package protocol defines what processes and Redis exchange: ids, keys, commands,
// answers and messages, and their text formats.
package protocol

import (
	"strconv"
	"strings"
	"time"
)

// Verb is an operation of the protocol. Each is one script, which the server runs
// atomically and which may run twice.
type Verb uint8

// The zero value, None, is no command.
const (
	None Verb = iota
	Acquire
	Yield
	Release
	Downgrade
)

// Command is a command about one lock, to be sent to Redis.
type Command struct {
	Verb  Verb
	ID    string        // the request that acquires, or owns
	TTL   time.Duration // acquire: the id's
	Next  string        // yield, downgrade: the request that replaces it
	Last  uint64        // release, yield, downgrade: last token assigned under id, 0 if only the grant's own
	Wait  bool          // acquire: enqueue if the lock is taken
	First bool          // acquire: the id was never sent before
	Own   string        // acquire: id of this process's own readers, which are not notified that it waits
	Check bool          // acquire: a re-check, which also tests the inbox by an echo
	Place int           // acquire: of a re-check, how many were ahead at the last one
	Held  bool          // acquire: about a grant that is held
	Echo  string        // acquire: nonce for that echo, set on sending
	Told  uint64        // acquire: the time up to which the previous call notified readers, 0 if all
	Heard bool          // release: another process waits, and is to hear of it before its sender does
	Link  *Span         // release, yield, downgrade: hold span of the lease that is given back
	Under any           // whatever its sender wants to send it under
	// release, yield: for how long the lock is kept from all others, although it is given
	// back; 0 for no longer
	Cooldown time.Duration

	// Ticket is, on a server of a quorum, what places the request in the queue.
	Ticket uint64

	At time.Time // when it was decided, which is before it is sent
}

// Outcome is the kind of a server's answer.
type Outcome uint8

// The outcomes of a command.
const (
	Unanswered Outcome = iota // it may have run or not, or may run later
	Granted                   // of a renewal: renewed
	Enqueued
	Refused // taken, and the command did not ask to wait
	NotOurs // the id does not own what the command should extend or give back
	Done
)

// Answer is a server's reply to a command.
type Answer struct {
	Outcome  Outcome
	Token    uint64        // granted: the grant's; queued, refused: the lock's last one, the floor
	Clock    uint64        // the server's time, µs
	Kept     bool          // granted: the id owned already, and was extended
	Forgot   bool          // kept: Redis had lost the lock's last token, so Token is new
	More     bool          // granted: others wait
	Place    int           // queued: how many are ahead
	Left     time.Duration // queued, refused: remaining TTL of the owner; Endless, Ownerless
	Blocker  string        // queued, refused: the owner, or else the head of the queue
	NoNotify bool          // queued, refused: the blocker does not notify waiters when it releases
	Echo     int           // receivers of the echo; NoEcho, EchoDenied
	Handed   int           // how many others were made owner and notified
	Gone     bool          // of a yield: the old request did not own
	Proved   bool          // of a release or yield, on a quorum: nobody else has owned since the grant, whatever had no answer
	Told     uint64        // queued: the time up to which readers were notified, 0 if all were
	// Unfinished says that the call reached its bound: more waiters may be dead, or may
	// enter, so the client must continue at once.
	Unfinished bool
	Link       *Span // granted by a message: hold span of the lease that was given back
	// Mark is, on a server of a quorum, what its clock showed, µs, when it was first seen
	// without data; 0 if that was so long ago that it does not matter.
	Mark uint64
}

// Special values of Answer.Left and Answer.Echo.
const (
	Endless   time.Duration = -1 * time.Millisecond // the owner has no expiry
	Ownerless time.Duration = -2 * time.Millisecond // there is no owner

	NoEcho     = -1 // none was requested
	EchoDenied = -2 // an ACL forbids to publish it
)

// Renewal is a grant to be renewed, and the result.
type Renewal struct {
	Owner any // belongs to the sender, and is not looked at
	Keys  *Keys
	Req   Request
	At    time.Time     // when it was decided, which is before it is sent
	Spare time.Duration // for how long it may wait, so that many do not leave at once
	Touch time.Duration // if not 0: keep the lock's last token for that long from now

	Outcome Outcome // Granted, NotOurs, Unanswered
	Clock   uint64  // the server's time, µs
	Err     error   // why it is Unanswered
}

// CancelRequest asks to end a request, whether it waits, owns or never arrived.
type CancelRequest struct {
	Keys *Keys
	ID   string
	Last uint64 // last token assigned under ID, 0 if only the grant's own
	Link *Span  // hold span of the lease that is given back
	// Cooldown is for how long the lock is kept from all others if ID owned it; 0 for no
	// longer.
	Cooldown time.Duration
	Prove    bool // a server of a quorum is to tell the lock's last token even if ID owned it
}

// Cancelled is the result of a cancel.
type Cancelled struct {
	Owned bool // the request owned the lock until then
	// Proved: nobody else has owned it since it was granted, although an acquire of it had no
	// answer. A quorum says so.
	Proved bool
	Token  uint64   // the lock's last one before this cancel granted the next; 0 if it proves nothing
	Clock  uint64   // of a server of a quorum: its time, µs, 0 if it owned
	Mark   uint64   // of a server of a quorum: see Answer.Mark
	Fail   *Failure // if not nil, the cancel was refused or has no answer
}

// Snapshot is the answer of inspect.lua.
type Snapshot struct {
	Value   string // of the lock's own key
	Left    time.Duration
	Clock   uint64 // µs
	Meta    string
	Readers []string // id, expiry in ms, …
	Queue   []string // its first 1,000 entries
	Length  int      // of the whole queue

	// Of a quorum: how many servers it has, how many of them answered and how many of these
	// name the owner, and the last token that any of them gave.
	Servers, Answered, Behind int
	Last                      uint64
}

// LastToken returns the token that a lock's meta key names, 0 if it names none.
func LastToken(meta string) uint64 {
	rest, ok := strings.CutPrefix(meta, FormatTag)
	if !ok {
		return 0
	}
	digits, _, _ := strings.Cut(rest, ":")
	token, err := strconv.ParseUint(digits, 10, 53)
	if err != nil {
		return 0
	}
	return token
}

// TokenLife is how long a lock's last token is remembered after its last use. The scripts
// remember and release_fast compute the same, for the owner they choose.
func TokenLife(ttl time.Duration) time.Duration { return max(10*time.Minute, 4*ttl) }

const (
	// MaxTTL is the longest TTL a request can have.
	MaxTTL = 30 * 24 * time.Hour
	// CommandTimeout is how long to wait for the answer to a command.
	CommandTimeout = 2 * time.Second
)
