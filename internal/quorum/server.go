package quorum

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// Inbox is the client's subscription to one server.
type Inbox interface {
	Channel() string
	// Confirmed reports whether the server's messages are known to arrive.
	Confirmed() bool
	// StartProbe returns the nonce of the echo that a command should request, "" for none.
	StartProbe(now time.Time, silence time.Duration) string
	// Published notes what an answer says of publishing; see protocol.Answer.Published.
	Published(receivers int)
	// ProbeSent notes to how many receivers the server has published the echo.
	ProbeSent(nonce string, receivers int)
	// RequireProbe notes that a command failed, so that the inbox has to be probed.
	RequireProbe(fail *protocol.Failure)
}

// Server is a quorum of servers, which its client uses as one. It is safe for concurrent use.
type Server struct {
	cfg        Config
	members    []*member
	quarantine time.Duration
	start      func(func()) bool       // starts a goroutine of the client
	deliver    func(*protocol.Message) // passes a message to its lock's state machine
	base       context.Context         // of all commands
	reports    Reports

	sends     chan *Send            // received from by idle senders
	deadlines redisserver.Deadlines // of commands

	clock serversClock

	mu    sync.Mutex // guards what follows; only the mutexes of members, inboxes and the clock are locked under it
	locks map[string]*handle
}

// handle is a lock in use.
type handle struct {
	*Lock
	timer *time.Timer
	at    time.Time // when the timer fires; zero if it is not set
}

// Options are what a quorum needs from its client.
type Options struct {
	Members    []*redisserver.Server
	Inboxes    []Inbox
	Quarantine time.Duration
	Client     string                  // the client's id
	Base       context.Context         // of all commands; ends with the client
	Start      func(func()) bool       // starts a goroutine, or returns false if the client is closed
	Deliver    func(*protocol.Message) // passes a message to its lock's state machine
	Reports    Reports
}

// New returns a quorum.
func New(o Options) *Server {
	s := &Server{quarantine: o.Quarantine, base: o.Base, start: o.Start, deliver: o.Deliver, reports: o.Reports,
		deadlines: redisserver.Deadlines{Base: o.Base}, locks: map[string]*handle{}, sends: make(chan *Send), clock: serversClock{began: time.Now()}}
	for i, srv := range o.Members {
		s.members = append(s.members, &member{srv: srv, quorum: s, place: i, inbox: o.Inboxes[i], stirred: make(chan struct{}, 1)})
	}
	s.cfg = Config{
		N: len(s.members),
		NewID: func(like protocol.Identity) string {
			return protocol.NewRequest(o.Client, like.Mode, like.TTL, like.Idles, like.Proof, like.Origin).ID
		},
		Proof: func(i int) protocol.Proof {
			if s.members[i].inbox.Confirmed() {
				return protocol.Counted
			}
			return protocol.Unproved
		},
		Ticket: s.ticket,
		Away:   func(i int) bool { return s.members[i].isAway() },
		Why:    func(i int) error { return s.members[i].whyAway() },

		RoundTrip: func(i int) time.Duration { return s.members[i].roundTrip.Estimate() },
	}
	return s
}

// HonorsDeadlines returns true: a command ends with its context, and soon in any case.
func (s *Server) HonorsDeadlines() bool { return true }

// Commands returns how many commands were sent to the servers.
func (s *Server) Commands() int64 {
	n := int64(0)
	for _, m := range s.members {
		n += m.srv.Commands()
	}
	return n
}

// A step passes an event to a lock and performs its effects. begin locks the mutex and returns the lock's
// handle, and endLocked unlocks it. Where commands begin and end, the two are called directly instead of
// step, because a function value for the event would move the effects to the heap.
func (s *Server) step(k *protocol.Keys, event func(l *Lock, now time.Time, fx *Effects)) {
	var fx Effects
	h := s.begin(k)
	event(h.Lock, time.Now(), &fx)
	s.endLocked(h, &fx)
}

func (s *Server) begin(k *protocol.Keys) *handle {
	s.mu.Lock()
	return s.handleLocked(k)
}

func (s *Server) endLocked(h *handle, fx *Effects) {
	s.settleLocked(h)
	s.mu.Unlock()
	s.perform(fx)
}

// handleLocked returns the handle of a lock, and creates it if there is none.
func (s *Server) handleLocked(k *protocol.Keys) *handle {
	h := s.locks[k.Lock]
	if h == nil {
		h = &handle{Lock: NewLock(&s.cfg, k)}
		s.locks[k.Lock] = h
	}
	return h
}

// settleLocked sets the lock's timer if that is needed, or forgets an idle lock.
func (s *Server) settleLocked(h *handle) {
	if h.Idle() {
		if s.locks[h.keys.Lock] == h { // else it was forgotten before, and the lock may have another handle
			delete(s.locks, h.keys.Lock)
		}
		if h.timer != nil {
			h.timer.Stop()
		}
		return
	}
	due := h.Due()
	if due.IsZero() || !h.at.IsZero() && !due.Before(h.at) {
		return
	}
	h.at = due
	fire := func() { s.start(func() { s.fire(h) }) }
	if h.timer == nil {
		h.timer = time.AfterFunc(time.Until(due), fire)
	} else {
		h.timer.Reset(time.Until(due))
	}
}

// fire is called when the lock's timer is due. If the lock was forgotten meanwhile, it has no requests, and
// the event does nothing.
func (s *Server) fire(h *handle) {
	var fx Effects
	s.mu.Lock()
	h.at = time.Time{}
	h.Tick(time.Now(), &fx)
	s.endLocked(h, &fx)
}

// perform performs the effects of a step. No mutex is held.
func (s *Server) perform(fx *Effects) {
	for _, send := range fx.Sends { // first: Close waits for these sends, and a caller woken below may call Close
		s.members[send.Server].begun()
	}
	for _, op := range fx.Done {
		if w, ok := op.Tag.(*pendingCall); ok {
			w.settled()
		}
	}
	for i := range fx.Messages {
		s.deliver(&fx.Messages[i])
	}
	for _, send := range fx.Sends {
		select {
		case s.sends <- send:
		default:
			if !s.start(func() { s.sender(send) }) {
				s.answered(send, Result{Fail: closed, Canceled: protocol.Canceled{Fail: closed}})
				s.members[send.Server].done()
			}
		}
	}
	for _, stray := range fx.Strays {
		s.members[stray.Server].stray(stray)
	}
}

var closed = &protocol.Failure{Err: protocol.ErrClosed, Kind: protocol.NoAnswer}

// senderIdle is for how long a sender waits for its next command.
const senderIdle = time.Second

// sender is a goroutine that sends a command, and then further ones, of any lock to any server. With
// a goroutine per command, growing its stack would take as long as everything else that this package
// does for a command. A sender ends after senderIdle without a command, or with the client; a panic
// in code that a command calls ends it, too.
func (s *Server) sender(send *Send) {
	idle := time.NewTimer(senderIdle)
	defer idle.Stop()
	for {
		s.run(send)
		idle.Reset(senderIdle)
		select {
		case send = <-s.sends:
		case <-idle.C:
			return
		case <-s.base.Done():
			return
		}
	}
}

// run sends a command and passes on its answer, which also starts the next command of the lane.
func (s *Server) run(send *Send) {
	res := Result{Fail: panicked, Canceled: protocol.Canceled{Fail: panicked}}
	defer func() {
		s.answered(send, res)
		s.members[send.Server].done() // last, when the next command of the lane has begun
	}()
	res = s.members[send.Server].do(s.contextOf(send.op), send)
	if send.Kind == Do {
		s.members[send.Server].tookRequest(&send.Cmd, &res)
	}
	s.compareClocks(send.Server, res.Answer.Clock)
}

// contextOf returns the context for a command that is sent now for an op. It has the values, such as
// a span, of the call that the op belongs to.
func (s *Server) contextOf(op *Op) context.Context {
	ctx := s.deadlines.Within(protocol.CommandTimeout)
	if op == nil {
		return ctx
	}
	w, ok := op.Tag.(*pendingCall)
	switch {
	case !ok || w.values == nil:
		return ctx
	case w.first.Context == ctx:
		return &w.first
	}
	return &valued{ctx, w.values} // the command waited in its lane, so first has an older deadline
}

// valued is a context with the values of another.
type valued struct {
	context.Context
	values context.Context
}

func (c *valued) Value(key any) any {
	if v := c.Context.Value(key); v != nil { // what the context package itself looks for
		return v
	}
	return c.values.Value(key)
}

// compareClocks updates the servers' clock from an answer. The clock followed is that of the first server
// that is not away, and does not refuse new requests, because clients that it has refused do not see its
// clock; until that server has answered, it is that of any other. Ours is the monotonic clock, which nobody
// sets. An answer that took longer shows an older time, so a greater offset is the more exact one. A
// smaller offset counts only a little, for clocks that drift, unless no answer can take that long: then a
// clock was set.
func (s *Server) compareClocks(server int, clock uint64) {
	if clock == 0 {
		return
	}
	offset := int64(clock) - s.clock.ours()
	follows := slices.ContainsFunc(s.members[:server], func(m *member) bool { return !m.isAway() && !m.refuses.Load() })
	c := &s.clock
	c.mu.Lock()
	defer c.mu.Unlock()
	refuses := s.members[server].refuses.Load()
	known := c.known && (server >= c.server || refuses)
	late := c.offset - offset
	switch {
	case known && (server > c.server && follows || refuses):
		return
	case known && server == c.server && late > 0 && late <= protocol.CommandTimeout.Microseconds():
		offset = c.offset - late/32
	}
	c.known, c.server, c.offset = true, server, offset
}

// serversClock is the client's estimate of the servers' time. It is only used to order waiters.
type serversClock struct {
	mu     sync.Mutex // guards what follows; nothing else is locked under it
	known  bool
	server int   // the server whose clock it is
	offset int64 // by how many µs that clock is ahead of ours

	began time.Time // never changes
}

// ours returns the time in µs by this machine's monotonic clock.
func (c *serversClock) ours() int64 { return c.began.UnixMicro() + time.Since(c.began).Microseconds() }

// ticket returns the ticket of a request that is made now.
func (s *Server) ticket() uint64 {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	return uint64(s.clock.ours() + s.clock.offset)
}

var panicked = &protocol.Failure{Err: protocol.ErrPanicked, Kind: protocol.NoAnswer}

// answered is the step that ends a command.
func (s *Server) answered(send *Send, res Result) {
	var fx Effects
	h := s.begin(send.Keys)
	h.Answered(send, res, time.Now(), &fx)
	s.endLocked(h, &fx)
}

// pendingCall is a call that waits for the decision of its ops.
type pendingCall struct {
	values context.Context // the call's context, for its values
	first  valued          // if set, the context of the commands that are sent at once
	done   chan struct{}

	mu   sync.Mutex // guards left
	left int
}

func (w *pendingCall) settled() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.left--; w.left == 0 {
		close(w.done)
	}
}

// await waits for the ops to be decided. When the servers have had their time, at most limit, or ctx ends,
// they are decided without those that have not answered.
func (s *Server) await(ctx context.Context, w *pendingCall, ops []*Op, keys []*protocol.Keys, limit time.Duration) {
	began := time.Now()
	timer := time.NewTimer(min(limit, minPatience)) // which servers may have more is seen only if it is needed
	defer timer.Stop()
wait:
	for {
		select {
		case <-w.done:
			return
		case <-timer.C:
			left := min(limit, s.patience(s.awaited(ops))) - time.Since(began)
			if left <= 0 {
				break wait
			}
			timer.Reset(min(left, lookAgain))
		case <-ctx.Done():
			break wait
		}
	}
	for i, op := range ops {
		s.step(keys[i], func(l *Lock, now time.Time, fx *Effects) {
			if !op.Decided() {
				l.Expire(op, now, fx)
			}
		})
	}
	<-w.done
}

// Do runs a command of the state machine.
func (s *Server) Do(ctx context.Context, k *protocol.Keys, c *protocol.Command) (protocol.Answer, error) {
	w := &pendingCall{values: ctx, first: valued{s.deadlines.Within(protocol.CommandTimeout), ctx}, left: 1, done: make(chan struct{})}
	fx := Effects{Sends: make([]*Send, 0, s.cfg.N)}
	h := s.begin(k)
	op := h.Do(c, time.Now(), &fx)
	op.Tag = w
	ttl := op.req.who.TTL
	s.endLocked(h, &fx)
	s.await(ctx, w, []*Op{op}, []*protocol.Keys{k}, limitFor(ttl))
	return op.Answer, op.Err
}

// Renew renews grants, and sets the outcome of each in batch.
func (s *Server) Renew(ctx context.Context, batch []protocol.Renewal) {
	w := &pendingCall{values: ctx, left: len(batch), done: make(chan struct{})}
	ops, keys := make([]*Op, len(batch)), make([]*protocol.Keys, len(batch))
	var fx Effects
	var shortest time.Duration
	s.mu.Lock()
	for i := range batch {
		b := &batch[i]
		h := s.handleLocked(b.Keys)
		ops[i], keys[i] = h.Renew(b, time.Now(), &fx), b.Keys
		ops[i].Tag = w
		if shortest == 0 || b.Req.TTL < shortest {
			shortest = b.Req.TTL
		}
		s.settleLocked(h)
	}
	s.mu.Unlock()
	byMember := make([][]*Send, len(s.members)) // renewals, which leave together
	others := fx.Sends[:0]
	for _, send := range fx.Sends {
		if send.Kind == Renew {
			byMember[send.Server] = append(byMember[send.Server], send)
		} else {
			others = append(others, send)
		}
	}
	fx.Sends = others
	s.perform(&fx)
	for i, sends := range byMember {
		if len(sends) == 0 {
			continue
		}
		m := s.members[i]
		if !s.start(func() { s.renew(m, sends) }) {
			for _, send := range sends {
				s.answered(send, Result{Renewed: protocol.Unanswered, Fail: closed})
			}
		}
	}
	s.await(ctx, w, ops, keys, limitFor(shortest))
	for i, op := range ops {
		batch[i].Outcome, batch[i].Clock, batch[i].Err = op.Renewed, op.Clock, op.Err
	}
}

// renew sends renewals to one server.
func (s *Server) renew(m *member, sends []*Send) {
	var results []Result
	defer func() {
		for i, send := range sends {
			res := Result{Renewed: protocol.Unanswered, Fail: panicked}
			if i < len(results) {
				res = results[i]
			}
			s.answered(send, res)
		}
		if len(results) > 0 {
			m.keepTokens(sends, results)
		}
	}()
	results = m.renew(sends)
}

// Touch does nothing: Renew extends the last tokens on each server.
func (s *Server) Touch(context.Context, []protocol.Renewal) error { return nil }

// Cancel cancels requests, and returns the result of each.
func (s *Server) Cancel(ctx context.Context, batch []protocol.CancelRequest) []protocol.Canceled {
	w := &pendingCall{values: ctx, left: len(batch), done: make(chan struct{})}
	ops, keys := make([]*Op, len(batch)), make([]*protocol.Keys, len(batch))
	for i := range batch {
		keys[i] = batch[i].Keys
		s.step(keys[i], func(l *Lock, now time.Time, fx *Effects) {
			ops[i] = l.CancelRequest(&batch[i], now, fx)
			ops[i].Tag = w
		})
	}
	s.await(ctx, w, ops, keys, maxPatience)
	results := make([]protocol.Canceled, len(batch))
	for i, op := range ops {
		results[i] = op.Canceled
	}
	return results
}

// Echo does nothing: a quorum probes the inbox at each server itself.
func (s *Server) Echo(context.Context, *protocol.Keys, string, string) (int, error) {
	return protocol.NoEcho, nil
}

// Receive passes a message from one server to its lock, whose keys are k.
func (s *Server) Receive(server int, m *protocol.Message, k *protocol.Keys) {
	var fx Effects
	h := s.begin(k)
	h.Receive(server, m, time.Now(), &fx)
	s.endLocked(h, &fx)
	s.members[server].stirs()
}

// Rejoined notes that the client's subscription to a server was confirmed again. A server that is
// away is sent a PING at once, and is asked about the requests that wait when it answers.
func (s *Server) Rejoined(server int) {
	s.rejoin(server)
	s.members[server].stirs()
}

// rejoin has the requests that wait ask a server again: its messages may have been missed, or it was
// not asked because it was away.
func (s *Server) rejoin(server int) {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.locks))
	s.mu.Unlock()
	for _, h := range all {
		var fx Effects
		s.mu.Lock()
		h.Rejoined(server, time.Now(), &fx)
		s.endLocked(h, &fx)
	}
}

// Drain waits until commands under way were answered and strays were canceled, except on servers
// that do not answer, or until ctx ends.
func (s *Server) Drain(ctx context.Context) {
	for _, m := range s.members {
		m.drain(ctx)
	}
}

// Halt stops the timers. The base context has ended before.
func (s *Server) Halt() {
	for _, m := range s.members {
		m.halt()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.locks {
		if h.timer != nil {
			h.timer.Stop()
		}
	}
}
