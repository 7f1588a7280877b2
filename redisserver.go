package leased

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

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
	node, ok := rdb.(interface{ Options() *redis.Options }) // a *redis.Client, or what embeds one
	c, plain := rdb.(*redis.Client)
	switch {
	case ok && node.Options().ContextTimeoutEnabled:
		s.ends = true
	case plain:
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

// explain makes of go-redis' error one that says what it is about.
func (s *redisServer) explain(err error) error {
	own, ok := s.rdb.(*redis.Client)
	switch {
	case err == nil:
		return nil
	case ok && errors.Is(err, redis.ErrClosed): // a Cluster's says it of a node that left, too
		return errRedisClosed
	case ok && errors.Is(err, context.DeadlineExceeded) && !unsent(err):
		// What waits for a connection ends with its context. The pool has forgotten
		// that by now, and only says how many are in use.
		if pool, size := own.PoolStats(), own.Options().PoolSize; int(pool.TotalConns)-int(pool.IdleConns) >= size {
			return errPoolExhausted{size}
		}
	}
	return inWords(ofNetwork(err))
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
	return cmd.Cmd, s.explain(err)
}

func (s *redisServer) do(ctx context.Context, k *keys, c *command) (answer, error) {
	k5 := k.all()
	last := decimal(c.last)
	var cmd *redis.Cmd
	var err error
	switch c.verb {
	case acquire:
		var wait any = "0"
		if c.wait {
			wait = "1"
		}
		args := []any{s.inboxes, c.id, wait, c.echo, milliseconds(c.ttl), milliseconds(tokenLife(c.ttl)), c.own}
		if c.told > 0 {
			args = append(args, decimal(c.told))
		}
		cmd, err = s.run(ctx, &acquireScript, k5[:], args...)
	case release:
		cmd, err = s.run(ctx, &releaseScript, k5[:], s.inboxes, c.id, last, formatSpan(c.link))
	case yield:
		cmd, err = s.run(ctx, &yieldScript, k5[:], s.inboxes, c.id, c.next, last, formatSpan(c.link))
	case downgrade:
		cmd, err = s.run(ctx, &downgradeScript, k5[:], s.inboxes, c.id, c.next, last, formatSpan(c.link))
	default:
		return answer{}, fmt.Errorf("leased: no such command: %d", c.verb)
	}
	if wrongType(err) && c.verb != acquire && s.overwritten(ctx, k) {
		return answer{outcome: notOurs}, nil
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
		return parseAnswer(reply)
	}
	return answer{}, malformed(cmd.Val())
}

// decimal returns n as an argument. 0 is the usual one and costs nothing.
func decimal(n uint64) any {
	if n == 0 {
		return "0"
	}
	return strconv.FormatUint(n, 10)
}

// overwritten reports whether it is the lock's own key that holds another type of
// value, so that nobody owns. It asks by a renewal of nobody's, which names no other
// key and changes nothing.
func (s *redisServer) overwritten(ctx context.Context, k *keys) bool {
	_, err := s.run(ctx, &renewScript, []any{k.lock}, formatTag+"nobody", "1")
	return wrongType(err)
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// tokenLife is how long a lock's last token is remembered after its last use.
func tokenLife(ttl time.Duration) time.Duration { return max(10*time.Minute, 4*ttl) }

// pipeline sends calls in one round trip and once more, by their text, those
// whose scripts the server did not know. Each command comes back with a reply or an
// error.
func (s *redisServer) pipeline(ctx context.Context, n int, call func(i int, byText bool) onceCmd) []onceCmd {
	cmds := make([]onceCmd, n)
	for i := range cmds {
		cmds[i] = call(i, false)
	}
	s.together(ctx, cmds)
	var again []onceCmd
	var places []int
	for i, cmd := range cmds {
		if unknownScript(cmd.Err()) {
			again, places = append(again, call(i, true)), append(places, i)
		}
	}
	s.together(ctx, again)
	for i, cmd := range again {
		cmds[places[i]] = cmd
	}
	return cmds
}

// together sends commands in one round trip. Where the connection itself was refused,
// go-redis says so by the pipeline's error and leaves it out of the commands.
func (s *redisServer) together(ctx context.Context, cmds []onceCmd) {
	if len(cmds) == 0 {
		return
	}
	s.sent.Add(int64(len(cmds)))
	_, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, cmd := range cmds {
			_ = p.Process(ctx, cmd)
		}
		return nil
	})
	for _, cmd := range cmds {
		if cmd.Err() != nil || cmd.Val() != nil {
			err = nil // then it is one command's own, and says nothing of the others
			break
		}
	}
	if err == nil {
		err = errNoReply
	}
	for _, cmd := range cmds {
		if cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(err)
		}
	}
}

var errNoReply = errors.New("leased: no reply to a command in a pipeline")

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
			batch[i].outcome, batch[i].err = unanswered, s.explain(err)
		}
	}
}

func (s *redisServer) touch(ctx context.Context, batch []renewal) error {
	var due []*renewal
	for i := range batch {
		if batch[i].touch > 0 && batch[i].outcome == granted {
			due = append(due, &batch[i])
		}
	}
	if len(due) == 0 {
		return nil
	}
	s.sent.Add(int64(len(due)))
	_, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, r := range due {
			p.PExpire(ctx, r.entry.keys.meta(), r.touch)
		}
		return nil
	})
	return s.explain(err) // also the first command's, where one was refused
}

func (s *redisServer) cancel(ctx context.Context, batch []*ghost) []cancelled {
	call := func(i int, byText bool) onceCmd {
		g := batch[i]
		k := g.keys.all()
		return cancelScript.call(ctx, byText, k[:], s.inboxes, g.id, strconv.FormatUint(g.last, 10), formatSpan(g.link))
	}
	cmds := s.pipeline(ctx, len(batch), call)
	s.goOn(ctx, cmds, call)
	results := make([]cancelled, len(cmds))
	for i, cmd := range cmds {
		results[i] = s.parseCancelled(cmd)
		if fail := results[i].fail; fail != nil && fail.kind == otherType && s.overwritten(ctx, batch[i].keys) {
			results[i] = cancelled{}
		}
	}
	return results
}

// parseCancelled reads {DONE, how many were made owner, 1 if the id owned, last token,
// unfinished}.
func (s *redisServer) parseCancelled(cmd onceCmd) cancelled {
	if err := cmd.Err(); err != nil {
		return cancelled{fail: classify(s.explain(err))}
	}
	reply, _ := cmd.Val().([]any)
	if len(reply) < 5 {
		return cancelled{fail: classify(malformed(cmd.Val()))}
	}
	owned, _ := reply[2].(int64)
	token, _ := reply[3].(int64)
	if !validToken(token) {
		token = 0
	}
	return cancelled{owned: owned == 1, token: uint64(token)}
}

// goOn sends those cancels again that ran out of what one call may do, which the last
// number of their answer says. Each round gets further, and ctx bounds them. What
// fails is left to the waiters' own re-checks.
func (s *redisServer) goOn(ctx context.Context, cmds []onceCmd, call func(i int, byText bool) onceCmd) {
	for {
		var again []int
		for i, cmd := range cmds {
			if reply, _ := cmd.Val().([]any); cmd.Err() == nil && len(reply) > 2 && reply[len(reply)-1] == int64(1) {
				again = append(again, i)
			}
		}
		if len(again) == 0 {
			return
		}
		all := call
		call = func(i int, byText bool) onceCmd { return all(again[i], byText) }
		cmds = s.pipeline(ctx, len(again), call)
	}
}

func (s *redisServer) echo(ctx context.Context, channel, nonce string) (int, error) {
	s.sent.Add(1)
	n, err := s.rdb.Publish(ctx, channel, formatTag+"echo "+nonce).Result()
	return int(n), s.explain(err)
}

func (s *redisServer) evict(ctx context.Context, k *keys) ([]string, error) {
	k5 := k.all()
	cmd, err := s.run(ctx, &evictScript, k5[:], s.inboxes)
	if err != nil {
		return nil, err
	}
	token, told, unfinished, evicted, err := parseEviction(cmd.Val())
	if err != nil {
		return nil, err
	}
	if unfinished { // a cancel goes on with letting others in, whatever it names; so do their re-checks
		_ = s.cancel(ctx, []*ghost{{id: "nobody", keys: k}})
	}
	for rest := evicted[told:]; len(rest) > 0 && err == nil; {
		some := rest[:min(len(rest), toldAtOnce)]
		rest = rest[len(some):]
		s.sent.Add(int64(len(some)))
		_, err = s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, id := range some {
				if who, err := parseID(id); err == nil {
					p.Publish(ctx, s.inboxes+who.client, fmt.Sprint(formatTag, "revoked ", token, " ", id, " ", k.lock))
				}
			}
			return nil
		})
	}
	if err != nil && !redis.HasErrorPrefix(err, "NOPERM") { // where nobody may publish they learn at their renewals
		err = fmt.Errorf("its owners were evicted, but not all could be told: %w", ofNetwork(err))
		return evicted, err
	}
	return evicted, nil
}

// toldAtOnce is how many owners are told of something in one round trip.
const toldAtOnce = 100

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
