package leased

import (
	"context"
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
		cmd, err = s.run(ctx, &acquireScript, k5[:], s.inboxes, c.id, wait, c.echo, milliseconds(c.ttl), milliseconds(tokenLife(c.ttl)), c.own)
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
		return parseAnswer(reply)
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
