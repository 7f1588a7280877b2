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

// Commands about different locks that are ready while others are under way leave together, in
// one pipeline. A command that is alone costs what it would without this, and those that many
// goroutines send at once cost a fraction of the system calls, on both sides.
//
//	process -> fewer than atOnce under way -> sent at once, by itself
//	        -> otherwise queued -> a round trip ends -> all that is queued leaves, led by one of them
//	                            -> nothing returns for patience -> the same
//	                            -> its context ends first -> an error
//
// There is no goroutine: a batch is sent by the goroutine of one of its commands, the leader,
// while the others wait for it. So whoever waits for those that send, as Close does, waits for
// batches too.
//
// Rules:
//
//  1. A caller that is alone sends as if there were no batches.
//  2. A command ends when its own context does, whatever the others do. The leader is the one
//     whose deadline is the last: no deadline cuts the others short, and those that are earlier
//     leave the batch.
//  3. Each command has the answer, or the error, that it would have had by itself. A panic of a
//     hook is the panic of each.
//  4. What hangs does not hold up others: when nothing has returned for patience, what is under
//     way does not count any more.
//
// It was measured against go-redis' AutoPipeline, which sends from a goroutine of its own: that
// costs a lone caller an eighth.
type batcher struct {
	srv    *Server
	unused sync.Pool // of *queued; not shared, because a channel belongs to one test's bubble

	mu       sync.Mutex // guards what follows, and queued.state; nothing else is locked under it
	underWay int        // round trips of this era
	era      int        // ends when nothing has returned for patience
	queue    []*queued  // empty if underWay is less than atOnce
	moved    time.Time  // when a round trip last ended, or the queue was last empty
	timer    *time.Timer
	timed    bool // whether timer is running
}

const (
	// atOnce is how many round trips are under way before commands queue: with fewer, a
	// connection that waits for the server's answer leaves it idle meanwhile; with more, there is
	// less to send together.
	atOnce = 4

	// mostTogether bounds a batch, for the server serves nobody else meanwhile: it should be back
	// within a millisecond, and an acquisition takes it about 20 µs.
	mostTogether = 32

	// patience is several times a round trip, and little beside what a command may take.
	patience = 2 * time.Millisecond
)

// queued is a command that waits for its turn, or for the leader of its batch.
type queued struct {
	ctx   context.Context
	cmd   onceCmd
	state queuedState

	batch []*queued // that it leads, with itself
	era   int       // in which that was begun

	told   chan struct{} // receives one value when it is to lead, or its batch has ended
	ended  bool          // whether the leader returned from sending
	panics any           // what it panicked with otherwise; nil if the goroutine was ended
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

// process sends cmd, by itself or with others. After an error that is the end of ctx, cmd must not
// be read: it may still be under way. If heard and cmd is sent by itself, a PING leaves with it.
//
// ctx has a deadline. It is not a user's context: only the client's end cancels it earlier, and
// with it those of all other commands.
func (b *batcher) process(ctx context.Context, cmd onceCmd, heard bool) error {
	b.mu.Lock()
	if b.underWay < atOnce {
		b.underWay++
		era := b.era
		b.mu.Unlock()
		defer b.returned(era) // also if a hook panics
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

// behindPing sends a command that publishes a message for which somebody waits, and a PING ahead
// of it.
//
// A server writes to its clients when it has carried out all that it has read from one of them, and
// begins with the client that was the last for which it got something to be written. That is the
// sender of the command, whose answer comes after the message. Whoever waits then loses the time
// of a write, and where both share a processor the time that the sender takes for the answer. With
// the answer to a PING the sender has something to be written before the message is there, so the
// message is written first. On a server that writes in another order the PING changes nothing, nor
// does it matter if it is refused. go-redis looks at the first answer to tell whether a connection is
// to be closed, so one to a server that has become read-only is kept until the next command.
func (s *Server) behindPing(ctx context.Context, cmd onceCmd) error {
	s.sent.Add(1)
	both := []redis.Cmder{onceCmd{redis.NewCmd(ctx, "ping")}, cmd}
	settle(both[1:], pipelined(ctx, s.Rdb, both))
	return cmd.Err()
}

// errNotSent is the error of commands whose leader was ended, by a hook that calls runtime.Goexit.
var errNotSent = errors.New("leased: a hook of the Redis client ended the goroutine that sent this command")

func (b *batcher) recycle(w *queued) {
	clear(w.batch)
	*w = queued{told: w.told, batch: w.batch[:0]}
	b.unused.Put(w)
}

// enqueueLocked queues w, and has stalled look when that is the first.
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

// leave takes w out of the queue, or its batch, when its context has ended, and reports whether
// it did: not if it leads, nor if the batch was sent and only a deadline tells how long that
// may take.
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

// returned counts a round trip that has ended, and has the next batch leave.
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

// nextLocked makes a batch of what is queued, and returns its leader, who is to be told; nil if
// nothing is queued, or it is to wait.
func (b *batcher) nextLocked() (leader *queued) {
	if b.underWay >= atOnce || len(b.queue) == 0 {
		return nil
	}
	n := min(len(b.queue), mostTogether)
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

// timeLocked has stalled called in d.
func (b *batcher) timeLocked(d time.Duration) {
	if b.timer == nil {
		b.timer = time.AfterFunc(d, b.stalled)
	} else {
		b.timer.Reset(d)
	}
}

// stalled has the queue leave if nothing has returned for patience. It is called by a timer that
// runs while commands are queued, and for patience at most afterwards.
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

// lead sends the batch of w. When it has ended, the next batch is told to leave first, and then
// those that wait for this one.
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
				other.told <- struct{}{} // one that has left does not look
			}
		}
		if panics != nil {
			panic(panics) // from here, where the stack still has what panicked
		}
	}()
	if len(w.batch) == 1 {
		err := b.srv.Rdb.Process(w.ctx, w.cmd)
		if err != nil && w.cmd.Err() == nil { // of a hook
			w.cmd.SetErr(err)
		}
	} else {
		cmds := make([]redis.Cmder, len(w.batch))
		for i, other := range w.batch {
			cmds[i] = other.cmd
		}
		settle(cmds, pipelined(ofSeveral{w.ctx}, b.srv.Rdb, cmds))
	}
	ended = true
}

// ofSeveral is the leader's context without its values: what is about several locks is no part of
// one's trace.
type ofSeveral struct{ context.Context }

func (ofSeveral) Value(any) any { return nil }

// tooLate is the error of a command that was in the queue, or in a batch, when its context ended.
func tooLate(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errTooLate{}
	}
	return ctx.Err()
}

// errTooLate matches context.DeadlineExceeded, for explain, which finds out why a command had no
// answer in time. Users get the error that a command with a connection of its own would have had.
type errTooLate struct{}

func (errTooLate) Error() string        { return "i/o timeout" }
func (errTooLate) Is(target error) bool { return target == context.DeadlineExceeded }

// asOfConnection returns the error of a connection that was read from for too long.
func (errTooLate) asOfConnection() error {
	return &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}
}
