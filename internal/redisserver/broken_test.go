package redisserver

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestAConnectionBrokeIfItsOtherEndClosedIt(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{io.EOF, true},
		{fmt.Errorf("a hook: %w", io.ErrUnexpectedEOF), true},
		{&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}, true},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}, true},
		{&net.OpError{Op: "read", Err: os.NewSyscallError("wsarecv", syscall.Errno(10054))}, true},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("wsasend", syscall.Errno(10053))}, true},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.ETIMEDOUT)}, true},
		{&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.EHOSTUNREACH)}, true},
		{&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ENETUNREACH)}, true},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("wsasend", syscall.Errno(10060))}, true},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("wsasend", syscall.Errno(10065))}, true},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("wsasend", syscall.Errno(10051))}, true},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, false},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ETIMEDOUT)}, false},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}, false},
		{os.ErrDeadlineExceeded, false},
		{net.ErrClosed, false}, // by this process
		{context.DeadlineExceeded, false},
		{nil, false},
	} {
		if got := ConnectionBroke(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

// froze is a hook that stands in for a server whose connections broke, and that answers nothing on the new
// ones.
type froze struct{}

func (froze) DialHook(next redis.DialHook) redis.DialHook { return next }

func (froze) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, _ redis.Cmder) error {
		<-ctx.Done()
		return ctx.Err()
	}
}

func (froze) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(_ context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			cmd.SetErr(io.EOF)
		}
		return io.EOF
	}
}

// Each search costs the connections that are in the pool.
func TestAPoolThatLedToAReplicaOnlyIsNotSearchedAgainForATime(t *testing.T) {
	replica := answerError("READONLY You can't write against a read only replica.")
	r := &road{fails: func(trip []redis.Cmder) error { trip[0].SetErr(replica); return replica }}
	onRoad(t, r, func(t *testing.T, s *Server) {
		for _, x := range []struct {
			after time.Duration
			trips int // since the beginning
		}{{0, 1}, {searchEvery / 2, 1}, {searchEvery, 2}, {0, 2}} {
			time.Sleep(x.after) // in virtual time
			if s.answers(t.Context(), lineOf([]any{"key"}), replica) {
				t.Error("a replica answers as if it were the primary")
			}
			if got := len(r.sizes()); got != x.trips {
				t.Errorf("%v later, %d commands were sent, want %d", x.after, got, x.trips)
			}
		}
	})
}

// The go-redis client of a user may have no time limits of its own.
func TestARenewalWhoseConnectionBrokeDoesNotWaitForAFrozenServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := redis.NewClient(redistest.Options("127.0.0.1:1"))
		defer rdb.Close()
		rdb.AddHook(froze{})
		s := New(rdb, "")
		s.Rdb = rdb // New uses a clone, and go-redis clones without hooks
		keys, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		batch := []protocol.Renewal{{Keys: &keys, Req: protocol.Request{ID: "a"}}}
		s.Renew(context.Background(), batch)
		if took := time.Since(began); batch[0].Err == nil || took != protocol.CommandTimeout {
			t.Errorf("it took %v and its error is %v", took, batch[0].Err)
		}
	})
}
