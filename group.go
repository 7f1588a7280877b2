package leased

import (
	"context"
	"runtime/pprof"
	"sync"
)

// How goroutines are counted and waited for. A closed group starts no more goroutines. When its wait
// returns true, all that it had started have finished. The wait lasts no longer than its context.

// group is a set of goroutines with one owner, which waits for all of them. Unlike a
// sync.WaitGroup, it can be closed, and the wait for it is bounded.
type group struct {
	mu   sync.Mutex    // guards what follows
	n    int           // goroutines that have not finished
	done chan struct{} // made by close; closed when n is 0
}

// start runs f in a goroutine of the group, or returns false after close. The goroutine
// inherits the profiler labels of the one that starts it. Goroutines that serve more than that
// caller first call unlabeled.
func (g *group) start(f func()) bool {
	n := g.enter()
	if n == 0 {
		return false
	}
	go func() {
		defer g.finished()
		if n <= maxRoomyGroup {
			growStack(-1)
		}
		f()
	}()
	return true
}

// add counts the calling goroutine until it calls finished, or returns false after close.
func (g *group) add() bool { return g.enter() > 0 }

// enter is like add, but returns the number of goroutines including this one, or 0 after close.
func (g *group) enter() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.done != nil {
		return 0
	}
	g.n++
	return g.n
}

func (g *group) finished() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.done != nil {
		close(g.done)
	}
}

// close makes start and add refuse from now on.
func (g *group) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.done == nil {
		g.done = make(chan struct{})
		if g.n == 0 {
			close(g.done)
		}
	}
}

// wait is called after close. It waits until all goroutines have finished or ctx ends, and
// reports whether they have finished.
func (g *group) wait(ctx context.Context) bool {
	g.mu.Lock()
	done := g.done
	g.mu.Unlock()
	return waitFor(ctx, done)
}

// waitFor waits for done or ctx, and reports whether done was closed; if both have ended, it
// was.
func waitFor(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return isClosed(done)
	}
}

// maxRoomyGroup is the size up to which a group starts its goroutines with a larger stack. In a
// larger group, most goroutines wait for their turn to send, or have another one send for them:
// with 64 goroutines that lock at once, a larger stack for each of them cost a twentieth of the
// processor time. Two of the goroutines are always there, and on a quorum
// one more for each further server.
const maxRoomyGroup = 8

// growStack grows the stack of a new goroutine to the size that sending a command needs. The
// deep calls into go-redis would grow it too, but more than once, and each time all frames on
// the stack are moved, which took a tenth of what a command costs the client. Here only two
// frames are moved. The size of this function's own frame makes the stack grow; at -1 nothing
// is written to it.
//
//go:noinline
func growStack(at int) byte {
	if at < 0 {
		return 0
	}
	var room [6 << 10]byte
	return room[at]
}

// unlabeled removes the profiler labels of the calling goroutine. It inherited them from the
// caller that happened to start it, and its work for others would be attributed to that caller.
func unlabeled() { pprof.SetGoroutineLabels(context.Background()) }

// ifCutShort calls f. If f does not return, because user code in it panics or ends the goroutine, as
// testing.T.FailNow does, it calls then, and the panic or the end goes on.
func ifCutShort(then, f func()) {
	returned := false
	defer func() {
		if !returned {
			then()
		}
	}()
	f()
	returned = true
}
