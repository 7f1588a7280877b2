package redisserver

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
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
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, false},
		{net.ErrClosed, false}, // by this process
		{context.DeadlineExceeded, false},
		{nil, false},
	} {
		if got := ConnectionBroke(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}
