package redisserver

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A batcher sends commands for different locks together, in one pipeline, if they become ready
// while others are in flight. A lone command costs what it would cost without batching, and
// commands that many goroutines send at once take a fraction of the system calls, on both sides.
//
//	process -> fewer than atOnce in flight -> sent immediately, by itself
//	        -> otherwise queued -> a round trip ends -> the queued commands are sent, led by one of them
//	                            -> no round trip ends for patience -> the same
//	                            -> the command's context ends first -> an error
//
// There is no goroutine: a batch is sent by the goroutine of one of its commands, the leader,
// while the others wait for it. So anything that waits for the senders, as Shutdown does, waits for
// their batches too.
//
// Rules:
//
//  1. A lone caller sends as if there were no batches.
//  2. A command ends when its own context does, whatever the others do. The leader is the command
//     with the latest deadline, so that no deadline cuts another command short; a command with an
//     earlier deadline leaves the batch when its deadline passes.
//  3. Each command gets the answer or the error that it would have got by itself. If a hook
//     panics, every command of the batch panics with the same value.
//  4. A round trip that hangs does not hold up other commands: once no round trip has ended for
//     patience, those in flight no longer count toward atOnce.
//
// go-redis's AutoPipeline was measured as an alternative. It sends from a goroutine of its own,
// which slows a lone caller by an eighth.
type batcher struct {
	srv    *Server
	unused sync.Pool // of *queued; not global, because a channel belongs to one test's synctest bubble

	mu       sync.Mutex // guards the fields below and queued.state; no other mutex is locked under it
	underWay int        // the round trips in flight that began in this era
	era      int        // incremented when no round trip has ended for patience
	queue    []*queued  // empty if underWay is less than atOnce
	moved    time.Time  // when a round trip last ended or the queue was last empty
	timer    *time.Timer
	timed    bool // whether timer is running
}

const (
	// atOnce is how many round trips may be in flight before commands queue. With fewer, the server
	// would be idle while the answers travel; with more, there would be fewer commands to send
	// together.
	atOnce = 4

	// maxTogether limits the size of a batch, because the server serves no other client while it
	// runs one. A batch should take less than a millisecond, and an acquisition takes about 20 µs.
	maxTogether = 32

	// patience is several round trips long, and short compared with the time limit of a command.
	patience = 2 * time.Millisecond
)

// queued is a command that waits for its turn or for the leader of its batch.
type queued struct {
	ctx   context.Context
	cmd   onceCmd
	state queuedState

	batch []*queued // the batch that this command leads, including itself
	era   int       // the era in which that batch began

	told   chan struct{} // receives one value when this command must lead or its batch has ended
	ended  bool          // whether the leader returned from sending
	panics any           // if not ended, what the leader panicked with; nil if its goroutine exited
}

type queuedState uint8

const (
	waiting queuedState = iota
	leading
	following
	gone
)

func newBatcher(s *Server) *batcher {
	b := &batcher{srv: s}
	b.unused.New = func() any { return &queued{told: make(chan struct{}, 1)} }
	return b
}

// process sends cmd, by itself or with others. If process returns because ctx ended, cmd must not
// be read, because it may still be in flight. If heard is true and cmd is sent by itself, a PING is
// sent with it.
//
// ctx must have a deadline. It is not a user's context: only closing the client cancels it earlier,
// together with the contexts of all other commands.
func (b *batcher) process(ctx context.Context, cmd onceCmd, heard bool) error {
	b.mu.Lock()
	if b.underWay < atOnce {
		b.underWay++
		era := b.era
		b.mu.Unlock()
		defer b.returned(era) // even if a hook panics
		if heard {
			return b.srv.behindPing(ctx, cmd)
		}
		return b.srv.Rdb.Process(ctx, cmd)
	}
	w := b.unused.Get().(*queued)
	w.ctx, w.cmd = ctx, cmd
	b.enqueueLocked(w)
	b.mu.Unlock()

	select {
	case <-w.told:
	case <-ctx.Done():
		if b.leave(w) {
			return tooLate(ctx)
		}
		<-w.told
	}
	if w.state == leading {
		b.lead(w)
	}
	err := cmd.Err()
	ended, panics := w.ended, w.panics
	b.recycle(w)
	switch {
	case ended:
		return err
	case panics != nil:
		panic(panics)
	}
	return errNotSent
}

// behindPing sends a PING followed by a command that publishes a message to a waiter.
//
// A server writes to its clients after it has run every command that it read from one of them. It
// starts with the client that was last to get pending output. Without the PING, that is the sender
// of the command, because its answer is produced after the message. The waiter then loses the time
// of one write and, where both share a processor, also the time that the sender takes to handle the
// answer. The answer to a PING gives the sender pending output before the message is published, so
// the server writes the message first. On a server that writes in another order the PING changes
// nothing, and it does not matter if the PING is refused. go-redis decides by the first answer
// whether to close a connection, so a connection to a server that has become read-only is kept
// until then; see Server.answers.
func (s *Server) behindPing(ctx context.Context, cmd onceCmd) error {
	s.sent.Add(1)
	both := []redis.Cmder{onceCmd{redis.NewCmd(ctx, "ping")}, cmd}
	settle(both[1:], pipelined(ctx, s.Rdb, both))
	return cmd.Err()
}

// errNotSent is the error of commands whose leader's goroutine was ended by a hook that called
// runtime.Goexit.
var errNotSent = errors.New("leased: a hook of the Redis client ended the goroutine that sent this command")

func (b *batcher) recycle(w *queued) {
	clear(w.batch)
	*w = queued{told: w.told, batch: w.batch[:0]}
	b.unused.Put(w)
}

// enqueueLocked queues w. If the queue was empty, enqueueLocked starts the timer that calls stalled,
// unless it is already running.
func (b *batcher) enqueueLocked(w *queued) {
	if len(b.queue) == 0 {
		b.moved = time.Now()
		if !b.timed {
			b.timed = true
			b.timeLocked(patience)
		}
	}
	b.queue = append(b.queue, w)
}

// leave takes w, whose context has ended, out of the queue or out of its batch, and reports whether
// it did. A leader cannot leave. A follower leaves only if its deadline has passed: if the client's
// end canceled its context, the leader's context is canceled too, so the batch ends soon.
func (b *batcher) leave(w *queued) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch w.state {
	case waiting:
		for i, other := range b.queue {
			if other == w {
				b.queue = append(b.queue[:i], b.queue[i+1:]...)
				break
			}
		}
	case following:
		if !errors.Is(w.ctx.Err(), context.DeadlineExceeded) {
			return false
		}
	default:
		return false
	}
	w.state = gone
	return true
}

// returned records that a round trip has ended, and tells the leader of the next batch to send it.
func (b *batcher) returned(era int) {
	b.mu.Lock()
	if era == b.era {
		b.underWay--
	}
	if len(b.queue) == 0 {
		b.mu.Unlock()
		return
	}
	b.moved = time.Now()
	leader := b.nextLocked()
	b.mu.Unlock()
	if leader != nil {
		leader.told <- struct{}{}
	}
}

// nextLocked makes a batch of the queued commands and returns its leader, which the caller must
// tell. It returns nil if nothing is queued or if atOnce round trips are in flight.
func (b *batcher) nextLocked() (leader *queued) {
	if b.underWay >= atOnce || len(b.queue) == 0 {
		return nil
	}
	n := min(len(b.queue), maxTogether)
	batch := b.queue[:n]
	var last time.Time
	for _, w := range batch {
		w.state = following
		if d, _ := w.ctx.Deadline(); leader == nil || d.After(last) {
			leader, last = w, d
		}
	}
	leader.state = leading
	leader.batch = append(leader.batch, batch...)
	leader.era = b.era
	b.queue = b.queue[:copy(b.queue, b.queue[n:])]
	b.underWay++
	return leader
}

// timeLocked schedules a call of stalled after d.
func (b *batcher) timeLocked(d time.Duration) {
	if b.timer == nil {
		b.timer = time.AfterFunc(d, b.stalled)
	} else {
		b.timer.Reset(d)
	}
}

// stalled has queued commands sent if no round trip has ended for patience. It is called by a timer
// that runs while commands are queued, and for at most patience afterwards.
func (b *batcher) stalled() {
	b.mu.Lock()
	if len(b.queue) == 0 {
		b.timed = false
		b.mu.Unlock()
		return
	}
	if left := patience - time.Since(b.moved); left > 0 {
		b.timeLocked(left)
		b.mu.Unlock()
		return
	}
	b.era++
	b.underWay = 0
	b.moved = time.Now()
	var leaders [atOnce]*queued
	n := 0
	for leader := b.nextLocked(); leader != nil; leader = b.nextLocked() {
		leaders[n] = leader
		n++
	}
	b.timeLocked(patience)
	b.mu.Unlock()
	for _, leader := range leaders[:n] {
		leader.told <- struct{}{}
	}
}

// lead sends the batch that w leads. Afterwards it first tells the leader of the next batch to send,
// and then the commands that wait for this batch.
func (b *batcher) lead(w *queued) {
	ended := false
	defer func() {
		var panics any
		if !ended {
			panics = recover()
		}
		b.returned(w.era)
		for _, other := range w.batch {
			other.ended, other.panics = ended, panics
			if other != w {
				other.told <- struct{}{} // a command that has left never reads it
			}
		}
		if panics != nil {
			panic(panics) // here, where the stack still shows what panicked
		}
	}()
	if len(w.batch) == 1 {
		_ = b.srv.Rdb.Process(w.ctx, w.cmd) // it sets the error on the command, also that of a hook
	} else {
		cmds := make([]redis.Cmder, len(w.batch))
		for i, other := range w.batch {
			cmds[i] = other.cmd
		}
		settle(cmds, pipelined(ofSeveral{w.ctx}, b.srv.Rdb, cmds))
	}
	ended = true
}

// ofSeveral is the leader's context without its values, because a pipeline for several locks does
// not belong to the trace of one of them.
type ofSeveral struct{ context.Context }

func (ofSeveral) Value(any) any { return nil }

// tooLate returns the error of a command whose context ended while it was queued or in a batch.
func tooLate(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errTooLate{}
	}
	return ctx.Err()
}

// errTooLate matches context.DeadlineExceeded, so that explain can find out why a command got no
// answer in time. Users get the error that a command with a connection of its own would have got.
type errTooLate struct{}

func (errTooLate) Error() string        { return "i/o timeout" }
func (errTooLate) Is(target error) bool { return target == context.DeadlineExceeded }

// asOfConnection returns the error of a connection whose read timed out.
func (errTooLate) asOfConnection() error {
	return &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}
}
