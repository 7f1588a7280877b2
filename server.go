package leased

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
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
	check bool          // acquire: a re-check, which also has the inbox prove its life
	echo  string        // acquire: nonce for that proof, set on sending
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
	handed  int           // release, yield: how many were made owner
	link    *spanRef      // granted, by a message: hold span of the lease that let go
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
	// outlive the lock when the server's clock goes back.
	touch(ctx context.Context, batch []renewal)
	// cancel ends many requests in one round trip; errs[i] is about batch[i].
	cancel(ctx context.Context, batch []*ghost) (errs []error)
	// echo publishes a nonce to an inbox and returns how many heard it.
	echo(ctx context.Context, channel, nonce string) (int, error)
	evict(ctx context.Context, k *keys) (evicted []string, err error)
	inspect(ctx context.Context, k *keys) (snapshot, error)
}

// redisServer speaks the protocol to one deployment.
type redisServer struct {
	rdb     redis.UniversalClient
	inboxes string // what comes before a client's name in its inbox channel
	ends    bool   // commands heed deadlines
	sent    atomic.Int64
}

func (s *redisServer) prompt() bool { return s.ends }

func newRedisServer(rdb redis.UniversalClient, prefix string) *redisServer {
	s := &redisServer{rdb: rdb, inboxes: inboxChannel(prefix, "")}
	c, ok := rdb.(*redis.Client)
	switch {
	case ok && c.Options().ContextTimeoutEnabled:
		s.ends = true
	case ok:
		// A clone on the same pool of connections, with a shorter time-out and
		// heeding deadlines: what gets no answer is asked again under the same
		// id, on another connection.
		limit := commandTimeout
		if t := c.Options().ReadTimeout; t > 0 {
			limit = min(limit, t)
		}
		own := c.WithTimeout(limit)
		own.Options().ContextTimeoutEnabled = true // of the clone alone
		s.rdb, s.ends = own, true
	}
	return s
}

func inboxChannel(prefix, client string) string { return prefix + "leased:inbox:" + client }

// run sends a script, once. Where the server does not know it, nothing was done
// and its text is sent.
func (s *redisServer) run(ctx context.Context, script *script, keys []any, args ...any) (*redis.Cmd, error) {
	s.sent.Add(1)
	cmd := script.call(ctx, false, keys, args...)
	err := s.rdb.Process(ctx, cmd)
	if unknownScript(err) {
		s.sent.Add(1)
		cmd = script.call(ctx, true, keys, args...)
		err = s.rdb.Process(ctx, cmd)
	}
	return cmd.Cmd, noAnswer(err)
}

func (s *redisServer) do(ctx context.Context, k *keys, c *command) (answer, error) {
	k5 := k.all()
	var last any = "0"
	if c.last > 0 {
		last = strconv.FormatUint(c.last, 10)
	}
	var cmd *redis.Cmd
	var err error
	switch c.verb {
	case acquire:
		var wait any = "0"
		if c.wait {
			wait = "1"
		}
		cmd, err = s.run(ctx, &acquireScript, k5[:], s.inboxes, c.id, wait, c.echo, milliseconds(c.ttl), milliseconds(tokenLife(c.ttl)))
	case release:
		cmd, err = s.run(ctx, &releaseScript, k5[:], s.inboxes, c.id, last, formatSpan(c.link))
	case yield:
		cmd, err = s.run(ctx, &yieldScript, k5[:], s.inboxes, c.id, c.next, last, formatSpan(c.link))
	case downgrade:
		cmd, err = s.run(ctx, &downgradeScript, k5[:], s.inboxes, c.id, c.next, last, formatSpan(c.link))
	default:
		return answer{}, fmt.Errorf("leased: no such command: %d", c.verb)
	}
	if err != nil {
		return answer{}, err
	}
	switch reply := cmd.Val().(type) {
	case int64: // a shortcut
		if c.verb == acquire {
			return answer{outcome: granted, token: uint64(reply), clock: uint64(reply)}, nil
		}
		return answer{outcome: done, handed: int(reply)}, nil
	case []any:
		a, err := parseAnswer(reply)
		if c.verb == yield && a.outcome == enqueued {
			a.handed = 1 // or we would have been granted
		}
		return a, err
	}
	return answer{}, malformed(cmd.Val())
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// tokenLife is how long a lock's last token is remembered after its last use.
func tokenLife(ttl time.Duration) time.Duration { return max(10*time.Minute, 4*ttl) }

// pipeline sends calls in one round trip and once more, by their text, those
// whose scripts the server did not know.
func (s *redisServer) pipeline(ctx context.Context, n int, call func(i int, byText bool) onceCmd) []onceCmd {
	s.sent.Add(int64(n))
	cmds := make([]onceCmd, n)
	_, _ = s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range cmds {
			cmds[i] = call(i, false)
			_ = p.Process(ctx, cmds[i])
		}
		return nil
	})
	var again []int
	for i, cmd := range cmds {
		if unknownScript(cmd.Err()) {
			again = append(again, i)
		}
	}
	if len(again) == 0 {
		return cmds
	}
	s.sent.Add(int64(len(again)))
	_, _ = s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, i := range again {
			cmds[i] = call(i, true)
			_ = p.Process(ctx, cmds[i])
		}
		return nil
	})
	return cmds
}

func (s *redisServer) renew(ctx context.Context, batch []renewal) {
	cmds := s.pipeline(ctx, len(batch), func(i int, byText bool) onceCmd {
		k, req := &batch[i].entry.keys, &batch[i].req
		ttl := milliseconds(req.ttl)
		if req.mode == shared {
			return renewSharedScript.call(ctx, byText, []any{k.lock, k.readers()}, req.id, ttl)
		}
		return renewScript.call(ctx, byText, []any{k.lock}, req.id, ttl)
	})
	for i, cmd := range cmds {
		us, err := cmd.Int64()
		switch {
		case err == nil && us > 0:
			batch[i].outcome, batch[i].clock = granted, uint64(us)
		case err == nil || wrongType(err): // somebody put another type in its place
			batch[i].outcome = notOurs
		default:
			batch[i].outcome, batch[i].err = unanswered, noAnswer(err)
		}
	}
}

func (s *redisServer) touch(ctx context.Context, batch []renewal) {
	var due []*renewal
	for i := range batch {
		if batch[i].touch > 0 && batch[i].outcome == granted {
			due = append(due, &batch[i])
		}
	}
	if len(due) == 0 {
		return
	}
	s.sent.Add(int64(len(due)))
	_, _ = s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, r := range due {
			p.PExpire(ctx, r.entry.keys.meta(), r.touch)
		}
		return nil
	})
}

func (s *redisServer) cancel(ctx context.Context, batch []*ghost) []error {
	cmds := s.pipeline(ctx, len(batch), func(i int, byText bool) onceCmd {
		g := batch[i]
		k := g.keys.all()
		return cancelScript.call(ctx, byText, k[:], s.inboxes, g.id, strconv.FormatUint(g.last, 10), formatSpan(g.link))
	})
	errs := make([]error, len(cmds))
	for i, cmd := range cmds {
		errs[i] = noAnswer(cmd.Err())
	}
	return errs
}

func (s *redisServer) echo(ctx context.Context, channel, nonce string) (int, error) {
	s.sent.Add(1)
	n, err := s.rdb.Publish(ctx, channel, formatTag+"echo "+nonce).Result()
	return int(n), noAnswer(err)
}

func (s *redisServer) evict(ctx context.Context, k *keys) ([]string, error) {
	k5 := k.all()
	cmd, err := s.run(ctx, &evictScript, k5[:], s.inboxes)
	if err != nil {
		return nil, err
	}
	return cmd.StringSlice()
}

func (s *redisServer) inspect(ctx context.Context, k *keys) (snapshot, error) {
	k5 := k.all()
	cmd, err := s.run(ctx, &inspectScript, k5[:], s.inboxes)
	if err != nil {
		return snapshot{}, err
	}
	reply, err := cmd.Slice()
	if err != nil {
		return snapshot{}, err
	}
	return parseSnapshot(reply)
}
