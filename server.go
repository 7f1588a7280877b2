package leased

import (
	"context"
	"time"
)

// verb is one operation of the protocol. Each is one script that runs as one
// step on the server and may run twice.
type verb uint8

const (
	nothing verb = iota
	acquire
	yield
	release
	downgrade
)

// command is what a lock wants sent.
type command struct {
	verb  verb
	id    string        // whose
	ttl   time.Duration // acquire: the id's
	next  string        // yield, downgrade: the request that comes in its place
	last  uint64        // release, yield, downgrade: last token given out under id, 0 if only the grant's own
	wait  bool          // acquire: enqueue if the lock is taken
	own   string        // acquire: id of readers of ours, who are not to be told that this waits
	check bool          // acquire: a re-check, which also has the inbox prove its life
	echo  string        // acquire: nonce for that proof, set on sending
	told  uint64        // acquire: up to where the call before told readers that this waits
	link  *spanRef      // release, yield, downgrade: hold span of the lease that lets others in
	at    time.Time     // when it was decided, which is before it is sent
}

// outcome is what a server answered.
type outcome uint8

const (
	unanswered outcome = iota // it may have happened or not, or happen later
	granted                   // of a renewal: renewed
	enqueued
	refused // taken, and the command did not want to wait
	notOurs // the id does not own what it was to keep or give back
	done
)

// answer is a server's reply to a command.
type answer struct {
	outcome outcome
	token   uint64        // granted: of the grant; queued, refused: the lock's last one, the floor
	clock   uint64        // server's time, µs
	more    bool          // granted: others wait
	place   int           // queued: how many are before us
	left    time.Duration // queued, refused: rest of the owner's TTL; endless, ownerless
	blocker string        // who owns, or is before us
	mute    bool          // the blocker will not tell us when it lets go
	echo    int           // receivers of the echo asked for; noEcho, echoDenied
	handed  int           // how many others were made owner, and told by a message
	gone    bool          // of a yield: the old request did not own
	told    uint64        // queued: up to where readers were told of it, 0 if all were
	// One call does only so much. More who wait may be dead, or may enter: somebody has
	// to go on at once.
	unfinished bool
	extended   bool     // granted: it owned already, and goes on
	link       *spanRef // granted, by a message: hold span of the lease that let go
}

const (
	endless   time.Duration = -1 * time.Millisecond // an owner without expiry
	ownerless time.Duration = -2 * time.Millisecond // nobody owns

	noEcho     = -1
	echoDenied = -2
)

// renewal is one grant to be kept, and what came of it.
type renewal struct {
	entry *entry
	req   request
	at    time.Time     // when it was decided, which is before it is sent
	touch time.Duration // if not 0: let the lock's last token live that long from now

	outcome outcome // granted, notOurs, unanswered
	clock   uint64
	err     error
}

// cancelled is what came of a cancel.
type cancelled struct {
	owned bool     // the request owned the lock until then
	token uint64   // the lock's last one, before another became owner by this; 0 if nobody remembers
	fail  *failure // if not nil, the cancel was not answered, or refused
}

// server is where locks live: one Redis deployment, or a quorum of them. Its
// methods block on the network and are safe for concurrent use.
type server interface {
	// prompt reports whether commands end when their context's deadline comes,
	// whatever the network does.
	prompt() bool
	// do runs one command. After an error its outcome is unknown.
	do(ctx context.Context, k *keys, c *command) (answer, error)
	// renew keeps many grants in one round trip.
	renew(ctx context.Context, batch []renewal)
	// touch lets the last tokens of long-held locks live on, where a renewal that
	// was granted asks for it. Nobody is lost without it: a token only has to
	// outlive the lock when the server's clock goes back; and there are three more
	// tries before it is forgotten.
	touch(ctx context.Context, batch []renewal) error
	// cancel ends many requests in one round trip; results[i] is about batch[i].
	cancel(ctx context.Context, batch []*ghost) (results []cancelled)
	// echo publishes a nonce to an inbox and returns how many heard it.
	echo(ctx context.Context, channel, nonce string) (int, error)
	evict(ctx context.Context, k *keys) (evicted []string, err error)
	inspect(ctx context.Context, k *keys) (snapshot, error)
}
