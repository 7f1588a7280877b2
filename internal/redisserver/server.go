// Package redisserver runs the protocol on one Redis deployment. Each command of the protocol
// is one script, called through a typed method.
package redisserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Server runs commands on one deployment, by one route. It is safe for concurrent use.
type Server struct {
	*common
	route
}

// common is what is the same for all routes to a deployment.
type common struct {
	Deployment
	Inboxes   string           // prefix of inbox channels, before a client's name
	OnSilence func(key string) // called, if not nil, when a command about the key had no answer in time; must not block
	args      *arguments
	loads     scriptLoads
	sent      atomic.Int64 // number of commands sent so far
	began     time.Time
	searched  atomic.Int64 // when the pool was last found to lead to a replica only, in ns since began; else 0
	mark      string       // key of a quorum's mark, see vote_before.lua; "" if this is not a quorum's server

	// For a quorum's server: how long its age matters, and a mark that is older than that, as an
	// argument of its scripts.
	quarantine time.Duration
	settled    atomic.Pointer[any]
}

// route is how commands are sent: together with commands for other locks, with a WAIT behind each round
// trip, or, if it is the zero value, by themselves. No route has both.
type route struct {
	batches *batcher
	confirm *confirmation
}

// by returns the server for commands that take another route.
func (s *Server) by(other route) *Server { return &Server{s.common, other} }

// HonorsDeadlines reports whether a command ends when its context does. That of a Cluster's client may first
// wait for the slots, whatever the context.
func (s *Server) HonorsDeadlines() bool { return s.Bounded && s.Kind == OneNode }

// Commands returns how many commands have been sent.
func (s *Server) Commands() int64 { return s.sent.Load() }

// New returns a Server that uses rdb. If rdb is a plain *redis.Client, the Server uses a clone of
// it that honors deadlines.
func New(rdb redis.UniversalClient, prefix string) *Server {
	s := &Server{common: &common{Deployment: DeploymentOf(rdb), began: time.Now(), Inboxes: protocol.InboxChannel(prefix, "")}}
	s.args = newArguments(s.Inboxes)
	if !s.Bounded {
		var cloned bool
		if s.Deployment, cloned = s.withContexts(); cloned {
			s.args.spare = new(sync.Pool) // there are no hooks, which could keep what they see; nor must the recorder of redis.SetOTelRecorder keep it
		}
	}
	// A Cluster's pipeline waits for all nodes that it names, so one that hangs would hold up the
	// locks of the others. And a user's type may do anything with single commands that it does not
	// do with pipelines.
	if s.Own != nil {
		s.batches = newBatcher(s)
	}
	return s
}

// NewMember returns a Server that uses rdb as one of a quorum's servers. The server's age matters
// for as long as the quarantine.
func NewMember(rdb redis.UniversalClient, prefix string, quarantine time.Duration) *Server {
	s := New(rdb, prefix)
	s.quarantine = quarantine
	s.mark = protocol.MarkKey(prefix)
	s.args.mark = s.mark
	return s
}

// vote runs the script that has the server vote, if it is one of a quorum's, with the ticket as last
// argument, and returns its mark.
func (s *Server) vote(ctx context.Context, script, voting *Script, keys []any, ticket uint64, args ...any) (any, uint64, error) {
	if s.mark == "" {
		val, err := s.run(ctx, script, keys, args...)
		return val, 0, err
	}
	val, err := s.run(ctx, voting, keys, append(args, strconv.FormatUint(ticket, 10))...)
	if err != nil {
		return nil, 0, err
	}
	return marked(val)
}

// voteAcquire is vote for an acquire, whose ticket is among its arguments. The mark is 0 if the lock
// was free and the mark is older than the quarantine.
func (s *Server) voteAcquire(ctx context.Context, k *protocol.Keys, c *protocol.Command) (any, uint64, error) {
	line := s.args.acquire(k, c)
	if s.mark == "" {
		val, err := s.send(ctx, false, &AcquireScript, line)
		return val, 0, err
	}
	var known any = unknownMark
	if settled := s.settled.Load(); settled != nil {
		known = *settled
	}
	val, err := s.send(ctx, false, &VoteAcquireScript, append(line, known))
	if err != nil {
		return nil, 0, err
	}
	if _, settled := val.(string); settled { // vote_fast.lua
		return val, 0, nil
	}
	val, mark, err := marked(val)
	if token, granted := val.(string); granted { // vote_fast.lua, with a mark that is new to us
		if us, bad := parseToken(token); bad == nil && mark > 0 && us > mark && us-mark > uint64(s.quarantine.Microseconds()) {
			var settled any = strconv.FormatUint(mark, 10)
			s.settled.Store(&settled)
			mark = 0
		}
	}
	return val, mark, err
}

// unknownMark is the argument that a script gets in place of a mark. No mark has this value.
const unknownMark = "-"

// marked splits the reply of a voting script.
func marked(val any) (any, uint64, error) {
	reply, _ := val.([]any)
	if len(reply) < 2 {
		return nil, 0, malformed(val)
	}
	text, _ := reply[0].(string)
	mark, err := strconv.ParseUint(text, 10, 53)
	if err != nil {
		return nil, 0, malformed(val)
	}
	if len(reply) > 2 { // vote_fast.lua
		return reply[1:], mark, nil
	}
	return reply[1], mark, nil
}

// Adopt has the server store a token that another server gave the owner. It answers NotOurs if id
// does not own the lock on this server.
func (s *Server) Adopt(ctx context.Context, k *protocol.Keys, id string, token uint64) (protocol.Answer, error) {
	k5 := k.All()
	val, err := s.run(ctx, &AdoptScript, k5[:], s.args.inboxes, id, decimal(token))
	if err != nil {
		return protocol.Answer{}, err
	}
	reply, _ := val.([]any)
	return parseAnswer(reply)
}

// Ping sends a PING, only to find out whether the server answers.
func (s *Server) Ping(ctx context.Context) error {
	s.sent.Add(1)
	return s.explain(s.Rdb.Ping(ctx).Err())
}

// explain turns an error of go-redis into one that names the cause.
func (s *Server) explain(err error) error {
	one := s.Kind == OneNode
	switch {
	case err == nil:
		return nil
	case one && errors.Is(err, redis.ErrClosed): // a cluster client also returns it for a node that left
		return ErrRedisClosed
	case one && redis.HasErrorPrefix(err, "MOVED"): // a cluster client would have followed it
		return &LackingError{clientLacks("it is part of a Cluster; use redis.NewClusterClient"), err}
	case one && errors.Is(err, context.DeadlineExceeded) && !notSent(err):
		// Waiting for a connection ends with the context, and the error does not say
		// so. All connections being in use is the best evidence left.
		if pool, size := s.Rdb.PoolStats(), s.options.PoolSize; int(pool.TotalConns)-int(pool.IdleConns) >= size {
			return errPoolExhausted{size}
		}
		if late, ok := err.(errTooLate); ok { //nolint:errorlint // it is never wrapped
			return late.asOfConnection()
		}
	}
	return inWords(ofNetwork(err))
}

// run sends a script once, by its hash, and returns its reply. A server that does not know it has
// done nothing, and is sent the text, see script_load.go. Where commands share pipelines, each repeats its own.
func (s *Server) run(ctx context.Context, script *Script, keys []any, args ...any) (any, error) {
	return s.send(ctx, false, script, lineOf(keys, args...))
}

// send is run for a line of keys and arguments, with one more parameter: heard says that a waiter
// expects a message that the script publishes.
func (s *Server) send(ctx context.Context, heard bool, script *Script, line []any) (any, error) {
	cmd := script.call(ctx, false, line)
	err := s.process(ctx, cmd, heard)
	if unknownScript(err) {
		cmd, err = s.sendUnknown(ctx, heard, script, line)
	}
	switch {
	case err == nil:
		s.args.recycle(line)
		return cmd.Val(), nil
	case s.metStale(err) && s.answers(ctx, line, err):
		return nil, answersAgain{s.explain(err)}
	}
	s.hadNoAnswer(line, err)
	return nil, s.explain(err)
}

// alone returns the server for a command that runs with a user's context, which must not end a pipeline
// that other commands share.
func (s *Server) alone() *Server { return s.by(route{}) }

// process sends one command by the server's route.
func (s *Server) process(ctx context.Context, cmd onceCmd, heard bool) error {
	if s.confirm != nil {
		s.together(ctx, []onceCmd{cmd}) // which counts it
		return cmd.Err()
	}
	s.sent.Add(1)
	if s.batches != nil {
		return s.batches.process(ctx, cmd, heard)
	}
	return s.Rdb.Process(ctx, cmd)
}

// Do runs a command of the state machine. An error means that the command was refused or had no
// answer; Classify says which.
func (s *Server) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	var val any
	var mark uint64
	var err error
	switch c.Verb {
	case protocol.Acquire:
		val, mark, err = s.voteAcquire(ctx, k, c)
	case protocol.Release:
		if c.Proof != 0 {
			return s.releaseInDoubt(ctx, k, c)
		}
		val, err = s.send(ctx, c.Heard, &ReleaseScript, s.args.release(k, c.ID, c.Last, c.Link, c.Cooldown))
	case protocol.Yield:
		val, mark, err = s.vote(ctx, &YieldScript, &VoteYieldScript, s.args.keys(k), c.Ticket, withCooldown(c.Cooldown, s.args.inboxes, c.ID, c.Next, decimal(c.Last), spanArgument(c.Link))...)
	case protocol.Downgrade:
		val, mark, err = s.vote(ctx, &DowngradeScript, &VoteDowngradeScript, s.args.keys(k), c.Ticket, s.args.inboxes, c.ID, c.Next, decimal(c.Last), spanArgument(c.Link))
	default:
		return protocol.Answer{}, fmt.Errorf("leased: no such command: %d", c.Verb)
	}
	if wrongType(err) && c.Verb != protocol.Acquire && s.overwritten(ctx, k) {
		return protocol.Answer{Outcome: protocol.NotOurs}, nil
	}
	if err != nil {
		return protocol.Answer{}, err
	}
	switch reply := val.(type) {
	case string: // acquire_fast.lua, vote_fast.lua
		token, err := parseToken(reply)
		return protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: token, Mark: mark, Echo: protocol.NoEcho}, err
	case int64:
		if c.Verb == protocol.Acquire { // recheck_fast.lua
			return protocol.Answer{Outcome: protocol.Enqueued, Brief: true, Echo: int(reply)}, nil
		}
		// release_fast.lua
		return protocol.Answer{Outcome: protocol.Done, Handed: int(reply)}, nil
	case []any:
		a, err := parseAnswer(reply)
		a.Mark = max(a.Mark, mark)
		return a, err
	}
	return protocol.Answer{}, malformed(val)
}

// releaseInDoubt runs a release that is to tell whether another owner came in between. It sends a cancel,
// which does what a release does, and replies with the lock's last token from before the next owner.
func (s *Server) releaseInDoubt(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	val, err := s.send(ctx, c.Heard, &CancelScript, s.args.release(k, c.ID, c.Last, c.Link, c.Cooldown))
	if wrongType(err) && s.overwritten(ctx, k) {
		return protocol.Answer{Outcome: protocol.NotOurs}, nil
	}
	if err != nil {
		return protocol.Answer{}, err
	}
	r := parseCanceled(val, nil)
	switch {
	case r.Fail != nil:
		return protocol.Answer{}, r.Fail.Err
	case !r.Owned:
		return protocol.Answer{Outcome: protocol.NotOurs}, nil
	}
	handed, _ := val.([]any)[1].(int64)
	return protocol.Answer{Outcome: protocol.Done, Handed: int(handed), Proved: r.Token == c.Proof, Unfinished: unfinished(val)}, nil
}

// decimal formats n as an argument. 0 is the most common one, and is not allocated.
func decimal(n uint64) any {
	if n == 0 {
		return "0"
	}
	return strconv.FormatUint(n, 10)
}

// overwritten reports whether it is the lock's own key that holds another type of value,
// so that there is no owner. It sends a renewal for an id that does not exist, which names
// no other key and changes nothing.
func (s *Server) overwritten(ctx context.Context, k *protocol.Keys) bool {
	_, err := s.run(ctx, &RenewScript, []any{k.Lock}, protocol.FormatTag+"nobody", "1")
	return wrongType(err)
}

// withCooldown appends a cool-down to the arguments of a script, unless it is 0. It ends no
// earlier than d, so part of a millisecond counts as a whole one.
func withCooldown(d time.Duration, args ...any) []any {
	if d <= 0 {
		return args
	}
	return append(args, Milliseconds(d+time.Millisecond-1))
}

// Milliseconds formats d as an argument.
func Milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// pipeline sends calls in one round trip. Those whose scripts the server did not know are sent in another
// one: the first of each script by its text, and the others, which come behind it on the same connection, by
// the hash. In a Cluster, or behind a proxy, these may meet another server that does not know it, and are sent
// by the text in a third round trip.
//
// Each may be repeated, see inTime. Each command returned has a reply or an error. Unless ctx has a deadline,
// each round trip has one of its own: if the second had only what a slow answer has left it, every attempt
// could fail in the same way.
func (s *Server) pipeline(ctx context.Context, n int, call func(i int, byText bool) onceCmd) []onceCmd {
	cmds := s.inTime(ctx, n, func(i int) onceCmd { return call(i, false) })
	for _, all := range []bool{false, true} {
		var again []int
		var byText []bool
		var sent []any // the hashes of those whose text is sent
		for i, cmd := range cmds {
			if !unknownScript(cmd.Err()) {
				continue
			}
			hash := cmd.Args()[1]
			first := !slices.Contains(sent, hash)
			if first {
				sent = append(sent, hash)
			}
			again, byText = append(again, i), append(byText, all || first)
		}
		if len(again) == 0 {
			break
		}
		for i, cmd := range s.inTime(ctx, len(again), func(i int) onceCmd { return call(again[i], byText[i]) }) {
			cmds[again[i]] = cmd
		}
	}
	return cmds
}

// inTime sends calls in one bounded round trip, and in another one if the first met a stale connection: to
// renew or cancel twice does no harm.
func (s *Server) inTime(ctx context.Context, n int, call func(i int) onceCmd) []onceCmd {
	cmds := make([]onceCmd, n)
	send := func() {
		for i := range cmds {
			cmds[i] = call(i)
		}
		ctx, stop := bounded(ctx)
		defer stop()
		s.together(ctx, cmds)
	}
	send()
	if n == 0 {
		return cmds
	}
	if s.metStale(cmds[0].Err()) && s.answers(ctx, cmds[0].Args(), cmds[0].Err()) {
		send()
	}
	s.hadNoAnswer(cmds[0].Args(), cmds[0].Err())
	return cmds
}

// bounded returns a context for one round trip: ctx if that has a deadline, and otherwise one that
// ends with ctx or after CommandTimeout.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, is := ctx.Deadline(); is {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, protocol.CommandTimeout)
}

// together sends commands in one round trip.
func (s *Server) together(ctx context.Context, cmds []onceCmd) {
	if len(cmds) == 0 {
		return
	}
	s.sent.Add(int64(len(cmds)))
	all := make([]redis.Cmder, 0, len(cmds)+1)
	for _, cmd := range cmds {
		all = append(all, cmd)
	}
	rdb := s.Rdb
	if s.confirm != nil {
		rdb = s.confirm.node
		s.sent.Add(1)
		all = append(all, s.confirm.next(ctx))
	}
	settle(all[:len(cmds)], pipelined(ctx, rdb, all))
}

// pipelined sends commands in one round trip.
func pipelined(ctx context.Context, rdb redis.UniversalClient, cmds []redis.Cmder) error {
	_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error { return p.BatchProcess(ctx, cmds...) })
	return err
}

// settle sets an error on commands of a pipeline that have neither that nor a reply. If the
// connection itself was refused, go-redis returns that as the pipeline's error, err, and does not
// set it on the commands.
func settle(cmds []redis.Cmder, err error) {
	for _, cmd := range cmds {
		if !unsettled(cmd) {
			err = nil // err is that of one command, and does not apply to the others
			break
		}
	}
	if err == nil {
		err = errNoReply
	}
	for _, cmd := range cmds {
		if unsettled(cmd) {
			cmd.SetErr(err)
		}
	}
}

func unsettled(cmd redis.Cmder) bool { return cmd.Err() == nil && cmd.(onceCmd).Val() == nil }

var errNoReply = errors.New("leased: no reply to a command in a pipeline")

// Renew renews a batch of grants in one pipeline, and sets the result of each. In a Cluster, the
// batch should be of one master's grants, because its results come when all nodes have answered.
func (s *Server) Renew(ctx context.Context, batch []protocol.Renewal) {
	cmds := s.pipeline(ctx, len(batch), func(i int, byText bool) onceCmd {
		k, req := batch[i].Keys, &batch[i].Req
		ttl := Milliseconds(req.TTL)
		if req.Mode == protocol.Shared {
			return RenewSharedScript.call(ctx, byText, lineOf([]any{k.Lock, k.Readers()}, req.ID, ttl))
		}
		return RenewScript.call(ctx, byText, lineOf([]any{k.Lock}, req.ID, ttl))
	})
	for i, cmd := range cmds {
		us, err := cmd.Int64()
		switch {
		case err == nil && us > 0:
			batch[i].Outcome, batch[i].Clock = protocol.Granted, uint64(us)
		case err == nil || wrongType(err): // another client replaced the key
			batch[i].Outcome = protocol.NotOurs
		default:
			batch[i].Outcome, batch[i].Err = protocol.Unanswered, s.explain(err)
		}
	}
}

// Touch extends the expiry of the last tokens of those renewed grants whose Touch is set.
func (s *Server) Touch(ctx context.Context, batch []protocol.Renewal) error {
	var due []*protocol.Renewal
	for i := range batch {
		if batch[i].Touch.Life > 0 && batch[i].Outcome == protocol.Granted {
			due = append(due, &batch[i])
		}
	}
	if len(due) == 0 {
		return nil
	}
	s.sent.Add(int64(len(due)))
	ctx, stop := bounded(ctx)
	defer stop()
	_, err := s.Rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, r := range due {
			p.PExpire(ctx, r.Keys.Meta(), r.Touch.TTL(r.Clock))
		}
		return nil
	})
	return s.explain(err) // this includes a refusal of the first command
}

// Cancel cancels a batch of requests, and returns the result of each. It repeats the
// unfinished ones until ctx is done. In a Cluster, see Renew.
func (s *Server) Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	script := &CancelScript
	if prove := len(batch) == 1 && batch[0].Prove; s.mark != "" && !prove {
		script = &VoteCancelScript // whose shortcut does not tell the last token
	}
	line := func(g *protocol.CancelRequest) []any {
		return s.args.release(g.Keys, g.ID, g.Last, g.Link, g.Cooldown)
	}
	call := func(i int, byText bool) onceCmd { return script.call(ctx, byText, line(&batch[i])) }
	results := make([]protocol.Canceled, len(batch))
	var again []int
	take := func(i int, val any, err error) {
		if err == nil && unfinished(val) {
			again = append(again, i)
		}
		results[i] = parseCanceled(val, err)
		if fail := results[i].Fail; fail != nil && fail.Kind == protocol.OtherType && s.overwritten(ctx, batch[i].Keys) {
			results[i] = protocol.Canceled{}
		}
	}
	if s.mark != "" && len(batch) == 1 { // most often, as part of an Unlock: a pipeline of one costs more than a command
		val, err := s.send(ctx, false, script, line(&batch[0]))
		take(0, val, err)
	} else {
		for i, cmd := range s.pipeline(ctx, len(batch), call) {
			take(i, cmd.Val(), s.explain(cmd.Err()))
		}
	}
	s.continueCancels(ctx, again, call)
	return results
}

// parseCanceled parses the reply of cancel.lua.
func parseCanceled(val any, err error) protocol.Canceled {
	if err != nil {
		return protocol.Canceled{Fail: Classify(err)}
	}
	if _, ok := val.(int64); ok { // release_fast.lua: it owned
		return protocol.Canceled{Owned: true}
	}
	reply, _ := val.([]any)
	if len(reply) < 5 {
		return protocol.Canceled{Fail: Classify(malformed(val))}
	}
	owned, _ := reply[2].(int64)
	token, _ := reply[3].(int64)
	if !validToken(token) {
		token = 0
	}
	c := protocol.Canceled{Owned: owned == 1, Token: uint64(token)}
	if len(reply) > 6 {
		c.Clock, c.Mark = clockAndMark(reply[4], reply[5])
	}
	return c
}

// unfinished reports whether cancel.lua has replied that it has to be sent again.
func unfinished(val any) bool {
	reply, _ := val.([]any)
	return len(reply) > 2 && reply[len(reply)-1] == int64(1)
}

// continueCancels repeats the cancels whose replies were unfinished. Each round makes progress,
// and ctx bounds them. If one fails, the waiters' own re-checks do the rest.
func (s *Server) continueCancels(ctx context.Context, again []int, call func(i int, byText bool) onceCmd) {
	for len(again) > 0 {
		cmds := s.pipeline(ctx, len(again), func(i int, byText bool) onceCmd { return call(again[i], byText) })
		var left []int
		for i, cmd := range cmds {
			if cmd.Err() == nil && unfinished(cmd.Val()) {
				left = append(left, again[i])
			}
		}
		again = left
	}
}

// Echo publishes nonce to an inbox channel and returns how many received it.
//
// It returns EchoDenied if the server may not publish for this client. In a Cluster the node that serves
// the lock publishes it; go-redis itself would choose any node.
func (s *Server) Echo(ctx context.Context, k *protocol.Keys, channel, nonce string) (int, error) {
	s.sent.Add(1)
	ctx, stop := bounded(ctx)
	defer stop()
	node, err := s.nodeOf(ctx, k.Lock)
	if err != nil {
		node = s.Deployment
	}
	// A demoted primary would publish, and count its own subscribers. So a write that changes nothing
	// leaves on the same connection: a server that is read-only refuses it.
	var n *redis.IntCmd
	_, err = node.Rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.ZRem(ctx, k.Readers(), "")
		n = p.Publish(ctx, channel, protocol.FormatTag+string(protocol.MessageEcho)+" "+nonce)
		return nil
	})
	if redis.HasErrorPrefix(n.Err(), "NOPERM") {
		return protocol.EchoDenied, nil
	}
	return int(n.Val()), s.explain(err)
}

// Evict ends the ownership of the lock and notifies its owners. It returns 1 if there were any, as the
// number of servers that had owners. If it returns 1 with an error, they were evicted all the same.
func (s *Server) Evict(ctx context.Context, k *protocol.Keys) (on int, err error) {
	owners, err := s.evict(ctx, k, "", "")
	return min(len(owners), 1), err
}

// EvictOwner is Evict on a server of a quorum, and returns the ids or values of the owners. It evicts
// nobody if the value of the lock's key is not value; an empty value matches any. It also makes the
// next owner's token greater than least, and than any that the evicted can have from other servers.
func (s *Server) EvictOwner(ctx context.Context, k *protocol.Keys, least uint64, value string) ([]string, error) {
	return s.evict(ctx, k, decimal(least), value)
}

// evict runs the script, and notifies those of the evicted that the script did not.
func (s *Server) evict(ctx context.Context, k *protocol.Keys, least any, value string) ([]string, error) {
	k5 := k.All()
	one := s.alone()
	if node, err := s.nodeOf(ctx, k.Lock); s.mark == "" && err == nil {
		s.clearPool(ctx, node, false, "ping") // first, because an eviction without answer must not be repeated: it would evict the next owner
	}
	val, err := one.run(ctx, &EvictScript, k5[:], s.args.inboxes, least, value)
	if readOnly(err) && errors.As(err, new(answersAgain)) { // a replica evicts nobody
		val, err = one.run(ctx, &EvictScript, k5[:], s.args.inboxes, least, value)
	}
	if err != nil {
		return nil, err
	}
	e, err := parseEviction(val)
	if err != nil {
		return nil, err
	}
	if e.unfinished { // any cancel grants the next; if it fails, the waiters' re-checks do
		_ = s.Cancel(ctx, []protocol.CancelRequest{{ID: "nobody", Keys: k}})
	}
	for rest := e.owners[e.notified:]; len(rest) > 0 && err == nil; {
		some := rest[:min(len(rest), notifiedAtOnce)]
		rest = rest[len(some):]
		s.sent.Add(int64(len(some)))
		_, err = s.Rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, id := range some {
				if who, err := protocol.ParseID(id); err == nil {
					p.Publish(ctx, s.Inboxes+who.Client, fmt.Sprint(protocol.FormatTag, protocol.MessageRevoked, " ", e.token, " ", id, " ", k.Lock))
				}
			}
			return nil
		})
	}
	if err != nil && !redis.HasErrorPrefix(err, "NOPERM") { // without the right to publish, owners find out when they renew
		err = fmt.Errorf("its owners were evicted, but not all could be notified: %w", ofNetwork(err))
		return e.owners, err
	}
	return e.owners, nil
}

// notifiedAtOnce is how many owners are notified in one round trip.
const notifiedAtOnce = 100

// Inspect returns what Redis holds of the lock.
func (s *Server) Inspect(ctx context.Context, k *protocol.Keys) (protocol.Snapshot, error) {
	k5 := k.All()
	val, err := s.alone().run(ctx, &InspectScript, k5[:], s.args.inboxes)
	if errors.As(err, new(answersAgain)) {
		val, err = s.alone().run(ctx, &InspectScript, k5[:], s.args.inboxes)
	}
	if err != nil {
		return protocol.Snapshot{}, err
	}
	reply, ok := val.([]any)
	if !ok {
		return protocol.Snapshot{}, malformed(val)
	}
	return parseSnapshot(reply)
}
