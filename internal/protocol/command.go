// Package protocol defines what processes and Redis exchange: ids, keys, commands, answers
// and messages, with their text formats.
package protocol

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// Verb is an operation of the protocol. Each operation is one script. The server runs it
// atomically, and it may run twice.
type Verb uint8

// The verbs. The zero value, None, means no command.
const (
	None Verb = iota
	Acquire
	Yield
	Release
	Downgrade
)

// Command is a command about one lock, to be sent to Redis. Where a field's comment starts
// with verbs, the field is for those verbs only.
type Command struct {
	Verb     Verb
	ID       string        // the request that acquires or owns the lock
	TTL      time.Duration // acquire: the TTL in ID
	Next     string        // yield, downgrade: the request that replaces ID
	Last     uint64        // release, yield, downgrade: last token assigned under ID, 0 if only the grant's own; acquire: last token known
	Wait     bool          // acquire: enqueue if the lock is taken
	First    bool          // acquire: ID has never been sent before
	Own      string        // acquire: id of this process's own readers, which are not told that it waits
	Recheck  bool          // acquire: this is a re-check, which also tests the inbox with an echo
	Place    int           // acquire: in a re-check, how many requests were ahead at the last one
	Question bool          // acquire: ID holds the grant and asks whether others wait; if it does not own the lock, it gets nothing
	Echo     string        // acquire: nonce for the echo of a re-check, set when the command is sent
	Waits    uint64        // acquire: in a brief re-check, when the waiting lease ends so far, in ms of the server's clock
	Until    uint64        // acquire: if not 0, the re-check is brief, and the waiting lease is to end then instead
	Told     uint64        // acquire: time up to which the previous call notified readers, 0 if it notified all
	Heard    bool          // release: another process waits, and must learn of the release before its sender does
	Link     *Span         // release, yield, downgrade: hold span of the lease that is given back
	Under    any           // for the sender: the trace span that the command is sent under
	// release, yield: for how long Redis keeps the lock from everybody after it was given
	// back; 0 for no longer
	Cooldown time.Duration
	// Proof is for a release of a grant that may have been given anew, after another owner: that nobody
	// else has owned the lock is proved only if this is its last token. 0 if ownership is proof enough. A
	// quorum knows by itself.
	Proof uint64

	// Ticket places the request in the queue of a server of a quorum.
	Ticket uint64

	At time.Time // when the command was decided on, which is before it is sent
}

// Outcome is the kind of a server's answer.
type Outcome uint8

// The outcomes of a command.
const (
	Unanswered Outcome = iota // the command may have run, may run later, or neither
	Granted                   // for a renewal: renewed
	Enqueued                  // the command's id is in the queue
	Refused                   // the lock is taken, and the command did not ask to wait
	NotOurs                   // the command was to extend or give back something that its id does not own
	Done
)

// Answer is a server's reply to a command. Where a field's comment starts with outcomes or
// verbs, the field is for those only.
type Answer struct {
	Outcome  Outcome
	Token    uint64        // granted: the grant's token; enqueued, refused: the lock's last token, the floor, or 0 if it is not remembered
	Clock    uint64        // the server's time, µs
	Kept     bool          // granted: the id owned the lock already, and was extended
	Forgot   bool          // granted, if Kept: Redis had lost the lock's last token, so Token is new
	More     bool          // granted: others wait
	Brief    bool          // enqueued: a brief re-check says that the request has waited ever since its last answer, and nothing more but Echo
	Place    int           // enqueued, refused: how many requests are ahead
	Left     time.Duration // enqueued, refused: remaining TTL of the owner when Redis was asked, or Endless or Ownerless
	Blocker  string        // enqueued, refused: the owner, or the head of the queue if there is none
	Split    bool          // refused by a quorum: no writer is known to own a majority of the servers, several may have asked at once
	NoNotify bool          // enqueued, refused: the blocker does not notify waiters when it releases
	Echo     int           // how many received the echo, or NoEcho or EchoDenied
	Handed   int           // how many other requests were made owner and notified
	Gone     bool          // yield: the old request did not own the lock
	Proved   bool          // release: nobody else has owned since the grant, whatever went unanswered; see Command.Proof
	Told     uint64        // enqueued: time up to which readers were notified, 0 if all were
	// Unfinished says that the call did as much as one call may do. More waiters may be dead
	// or may enter, so the client must continue at once.
	Unfinished bool
	Link       *Span // granted by a message: hold span of the lease that was given back
	// Mark is, for a server of a quorum, the server's time in µs when it was first seen without
	// data; 0 if that was too long ago to matter.
	Mark uint64
}

// Floor returns, for a request that is queued, a token that every grant after the answer exceeds: the
// lock's last one or, if the server does not remember that, a time before the answer. It is 0 if
// neither is known.
func (a *Answer) Floor() uint64 {
	if a.Token == 0 && a.Clock > 0 {
		return a.Clock - 1
	}
	return a.Token
}

// Published returns what the answer to c says of publishing: EchoDenied, how many received an echo, or
// NoEcho if it says nothing. An answer without an echo has a count of 0, too.
func (a *Answer) Published(c *Command) int {
	if a.Echo == 0 && (c.Echo == "" || a.Outcome != Enqueued && a.Outcome != Granted) {
		return NoEcho
	}
	return a.Echo
}

// Special values of Answer.Left and Answer.Echo.
const (
	Endless   time.Duration = -1 * time.Millisecond // the owner has no expiry
	Ownerless time.Duration = -2 * time.Millisecond // there is no owner

	NoEcho     = -1 // none was requested
	EchoDenied = -2 // an ACL forbids publishing it
)

// Renewal is a grant to be renewed, and the result of renewing it.
type Renewal struct {
	Owner any // for the sender's use; nothing else reads it
	Keys  *Keys
	Req   Request
	At    time.Time     // a time before the renewal is sent
	Spare time.Duration // how long it may wait before it is sent, so that not too many leave at once
	Touch Touch         // for how long the lock's last token is kept from now on

	Outcome Outcome // Granted, NotOurs, Unanswered
	Clock   uint64  // the server's time, µs
	Err     error   // why the outcome is Unanswered
}

// Touch says for how long a server keeps the last token of a lock: for Life from when its clock has reached
// Token, which the token is ahead of if the clock was set back. The zero value changes nothing.
type Touch struct {
	Life  time.Duration
	Token uint64
}

// TTL returns how long that is when the server's clock shows clock, in µs.
func (t Touch) TTL(clock uint64) time.Duration {
	if t.Token <= clock {
		return t.Life
	}
	return t.Life + time.Duration(min(t.Token-clock, maxAhead))*time.Microsecond
}

// maxAhead bounds how much longer than usual a token is kept, in µs: about 30 years, as in the scripts.
const maxAhead = 1e15

// CancelRequest asks to end a request, whether that waits, owns the lock or never arrived.
type CancelRequest struct {
	Keys *Keys
	ID   string
	Last uint64 // last token assigned under ID, 0 if only the grant's own
	Link *Span  // hold span of the lease that is given back
	// Cooldown is for how long Redis keeps the lock from everybody afterwards if ID owned it;
	// 0 for no longer.
	Cooldown time.Duration
	Prove    bool // on a quorum: return the lock's last token even if ID owned the lock
}

// Canceled is the result of a cancel.
type Canceled struct {
	Owned bool // the request owned the lock until then
	// Proved is set by a quorum only: nobody else has owned the lock since it was granted,
	// although an acquire had no answer.
	Proved bool
	Token  uint64   // the lock's last token before this cancel granted the next request; 0 if it proves nothing
	Clock  uint64   // from a server of a quorum: its time in µs; 0 where the shortcut of a release has ended a writer's lock
	Mark   uint64   // from a server of a quorum: see Answer.Mark
	Fail   *Failure // if not nil, the cancel was refused or had no answer
}

// Snapshot is the answer of inspect.lua.
type Snapshot struct {
	Value   string // value of the lock's own key; "" if there is none, EmptyValue if it is empty
	Left    time.Duration
	Clock   uint64 // µs
	Meta    string
	Readers []string // alternately an id and its expiry in ms
	Queue   []string // those of the first 1,000 entries that are alive
	Length  int      // how many entries of the whole queue are alive

	// For a quorum: how many servers it has, how many of them answered, how many of those name
	// this owner, and the highest last token that any of them reported.
	Servers, Answered, Behind int
	Last                      uint64
}

// Waiting returns the requests of Queue in their order, and how many wait in the whole queue. Of each
// client it returns and counts only the last one that is in Queue: the cancel of an earlier one has not
// arrived yet.
func (s *Snapshot) Waiting() (requests []string, number int) {
	clients := map[string]bool{}
	for _, request := range slices.Backward(s.Queue) {
		if id, err := ParseID(request); err == nil {
			if clients[id.Client] {
				continue
			}
			clients[id.Client] = true
		}
		requests = append(requests, request)
	}
	slices.Reverse(requests)
	return requests, s.Length - (len(s.Queue) - len(requests))
}

// EmptyValue stands in a Snapshot for a key whose value is the empty string, so that it does not look free.
const EmptyValue = `""`

// ParseMeta returns the last token from the value of a lock's meta key, and the server's time when
// the token was stored. Each is zero if the value does not have it.
func ParseMeta(meta string) (token uint64, at time.Time) {
	rest, ok := strings.CutPrefix(meta, FormatTag)
	if !ok {
		return 0, time.Time{}
	}
	digits, rest, _ := strings.Cut(rest, ":")
	if n, err := strconv.ParseUint(digits, 10, 53); err == nil {
		token = n
	}
	digits, _, _ = strings.Cut(rest, ":") // an owner's id may follow
	if us, err := strconv.ParseUint(digits, 10, 53); err == nil {
		at = time.UnixMicro(int64(us))
	}
	return token, at
}

// LastToken returns the last token from the value of a lock's meta key, 0 if there is none.
func LastToken(meta string) uint64 {
	token, _ := ParseMeta(meta)
	return token
}

// TokenLife is how long a lock's last token is remembered after its last use. The scripts
// compute the same time for the owner that they choose: in remember and in the shortcuts.
func TokenLife(ttl time.Duration) time.Duration { return max(10*time.Minute, 4*ttl) }

const (
	// DefaultTTL is the TTL of a lock that is given none.
	DefaultTTL = 30 * time.Second
	// DefaultQuarantine is the quarantine of a quorum's servers that is given none.
	DefaultQuarantine = time.Minute
	// MaxTTL is the longest TTL a request can have.
	MaxTTL = 30 * 24 * time.Hour
	// CommandTimeout is how long to wait for the answer to a command.
	CommandTimeout = 2 * time.Second
)
