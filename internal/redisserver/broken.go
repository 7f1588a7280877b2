package redisserver

import (
	"context"
	"errors"
	"io"
	"syscall"

	"github.com/redis/go-redis/v9"
)

// A server, or a proxy in front of it, closes connections when it restarts, fails over, or finds them
// idle for long. go-redis looks at an idle connection before it uses it, but cannot where it is encrypted
// or comes from a Dialer of the user's. There, each command after such a cut meets another connection
// that was closed long before, and fails, while the server answers on every new one.

// The errors of Windows for a connection that was reset or aborted. Package syscall has names for them
// on Windows only, and its ECONNRESET and EPIPE are invented numbers there, which connections never return.
const (
	windowsConnReset   = syscall.Errno(10054) // WSAECONNRESET
	windowsConnAborted = syscall.Errno(10053) // WSAECONNABORTED
)

// ConnectionBroke reports whether err says that a connection was closed, and not by this process.
func ConnectionBroke(err error) bool {
	for _, end := range [...]error{
		io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe,
		syscall.ECONNRESET, syscall.EPIPE, windowsConnReset, windowsConnAborted,
	} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// answersAgain is the error of a command that met a broken connection, if the server has answered a PING
// since.
type answersAgain struct{ error }

func (e answersAgain) Unwrap() error { return e.error }

// broke reports whether a command failed because its connection broke, where that is for the Server to
// look after. A quorum looks after its servers itself.
func (s *Server) broke(err error) bool { return s.mark == "" && ConnectionBroke(err) }

// answers rids the pools of the node that a line is for of broken connections, and reports whether the node
// answers. Unless ctx has a deadline, it takes no longer than a round trip: a server may be frozen right
// after a connection to it broke.
func (s *Server) answers(ctx context.Context, line []any) bool {
	ctx, stop := bounded(ctx)
	defer stop()
	node, err := s.nodeOfLine(ctx, line)
	return err == nil && s.clearPool(ctx, node, false) && s.clearPool(ctx, node, true)
}

// nodeOfLine returns the node that has the first key of a line.
func (s *Server) nodeOfLine(ctx context.Context, line []any) (redis.UniversalClient, error) {
	key, _ := line[firstKey].(string)
	return s.nodeOf(ctx, key)
}

// clearPool sends PINGs, on the connections that pipelines use or on the others, until one is answered or
// all connections that are idle must have been tried, and reports whether one was answered. A PING
// that meets a broken connection has go-redis discard it. rdb must be a client of one node; otherwise
// clearPool does nothing.
func (s *Server) clearPool(ctx context.Context, rdb redis.UniversalClient, pipelines bool) (answered bool) {
	node, ok := rdb.(oneNode)
	if !ok {
		return false
	}
	pool := rdb.PoolStats()
	idle := int(pool.IdleConns)
	if pipelines && pool.PipelineStats != nil {
		idle = max(idle, int(pool.PipelineStats.IdleConns))
	}
	for tries := 0; tries <= idle; tries++ { // the last one on a connection that is new
		s.sent.Add(1)
		cmd := onceCmd{redis.NewCmd(ctx, "ping")}
		var err error
		if pipelines {
			err = pipelined(ctx, rdb, []redis.Cmder{cmd})
		} else {
			err = rdb.Process(ctx, cmd)
		}
		switch {
		case err == nil && !node.Options().PoolFIFO:
			return true // and the connection is the next one to be used
		case err == nil:
			answered = true
		case !ConnectionBroke(err):
			return false
		}
	}
	return answered
}
