package redisserver

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// A server, or a proxy in front of it, closes connections when it restarts, fails over, or finds them
// idle for long. go-redis looks at an idle connection before it uses it, but cannot where it is encrypted
// or comes from a Dialer of the user's. There, each command after such a cut meets another connection
// that was closed long before, and fails, while the server answers on every new one.
//
// In the same way, after a planned failover behind an address that stays the same, each connection that was
// in the pool leads to the old primary, which answers, but is a replica.

// The errors of Windows. Package syscall has names for them on Windows only, and its ECONNRESET and the
// like are invented numbers there, which connections never return.
const (
	windowsConnReset       = syscall.Errno(10054) // WSAECONNRESET
	windowsConnAborted     = syscall.Errno(10053) // WSAECONNABORTED
	windowsTimedOut        = syscall.Errno(10060) // WSAETIMEDOUT
	windowsHostUnreachable = syscall.Errno(10065) // WSAEHOSTUNREACH
	windowsNetUnreachable  = syscall.Errno(10051) // WSAENETUNREACH
)

// ConnectionBroke reports whether err says that a connection was closed, and not by this process, or that
// the system has given it up because its other end is gone.
func ConnectionBroke(err error) bool {
	if failed := new(net.OpError); errors.As(err, &failed) && failed.Op == "dial" {
		return false // there was none
	}
	for _, end := range [...]error{
		io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe,
		syscall.ECONNRESET, syscall.EPIPE, windowsConnReset, windowsConnAborted,
		syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH, // of keep-alives without an answer
		windowsTimedOut, windowsHostUnreachable, windowsNetUnreachable,
	} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// readOnly reports whether err says that a server is a replica.
func readOnly(err error) bool { return IsServerReply(err) && hasCode(err, "READONLY") }

// stale reports whether err says that a connection is of no use anymore: it broke, or leads to a replica.
func stale(err error) bool { return ConnectionBroke(err) || readOnly(err) }

// answersAgain is the error of a command that met a stale connection, if the server has answered on another
// one since.
type answersAgain struct{ error }

func (e answersAgain) Unwrap() error { return e.error }

// metStale reports whether a command failed because its connection is stale, where that is for the Server
// to look after. A quorum looks after its servers itself, and they have no replicas.
func (s *Server) metStale(err error) bool { return s.mark == "" && stale(err) }

// answers rids the pools of the node that a line is for of stale connections, after a command met one with
// the error err, and reports whether the node answers. Unless ctx has a deadline, it takes no longer than a
// round trip: a server may be frozen right after a connection to it broke.
func (s *Server) answers(ctx context.Context, line []any, err error) bool {
	ctx, stop := bounded(ctx)
	defer stop()
	replica := readOnly(err)
	probe := []any{"ping"}
	if replica {
		if last := s.searched.Load(); last != 0 && time.Since(s.began) < time.Duration(last)+searchEvery {
			return false
		}
		// A write that changes nothing: the key is not that of a sorted set, or has no such member.
		probe = []any{"zrem", line[firstKey], ""}
	}
	node, err := s.nodeOfLine(ctx, line)
	found := err == nil && s.clearPool(ctx, node, false, probe...) && s.clearPool(ctx, node, true, probe...)
	if replica && !found {
		s.searched.Store(int64(time.Since(s.began)))
	}
	return found
}

// searchEvery is how long a pool that led to a replica only is not searched again: each search costs the
// connections that are in it.
const searchEvery = time.Second

// nodeOfLine returns the node that has the first key of a line.
func (s *Server) nodeOfLine(ctx context.Context, line []any) (Deployment, error) {
	key, _ := line[firstKey].(string)
	return s.nodeOf(ctx, key)
}

// clearPool sends a command, the probe, on the connections that pipelines use or on the others, until it is
// carried out or all connections that are idle must have been tried, and reports whether it was. A probe
// that meets a stale connection has go-redis discard it. If on is not a client of one node, clearPool does
// nothing.
func (s *Server) clearPool(ctx context.Context, on Deployment, pipelines bool, probe ...any) (answered bool) {
	if on.Kind != OneNode {
		return false
	}
	rdb := on.Rdb
	idle := idleIn(rdb, pipelines)
	for tries := 0; tries <= idle; tries++ { // the last one on a connection that is new
		fresh := idleIn(rdb, pipelines) == 0
		err := s.sendOn(ctx, rdb, pipelines, probe...)
		if wrongType(err) { // a replica would have refused it before
			err = nil
		}
		switch {
		case err == nil && !on.options.PoolFIFO:
			return true // and the connection is the next one to be used
		case err == nil:
			answered = true
		case !stale(err) || readOnly(err) && fresh: // a new connection led to a replica
			return false
		}
	}
	return answered
}

// sendOn sends a command on one of the connections that pipelines use, or of the others.
func (s *Server) sendOn(ctx context.Context, rdb redis.UniversalClient, pipelines bool, args ...any) error {
	s.sent.Add(1)
	cmd := onceCmd{redis.NewCmd(ctx, args...)}
	if pipelines {
		return pipelined(ctx, rdb, []redis.Cmder{cmd})
	}
	return rdb.Process(ctx, cmd)
}

// idleIn returns how many connections are idle, of those that pipelines use, if they have a pool of their
// own, and of the others.
func idleIn(rdb redis.UniversalClient, pipelines bool) int {
	idle := unused(rdb, false)
	if pipelines {
		idle = max(idle, unused(rdb, true))
	}
	return idle
}

// unused returns how many connections are idle, of those that pipelines have for themselves, or of the others.
func unused(rdb redis.UniversalClient, pipelines bool) int {
	pool := rdb.PoolStats()
	switch {
	case !pipelines:
		return int(pool.IdleConns)
	case pool.PipelineStats != nil:
		return int(pool.PipelineStats.IdleConns)
	}
	return 0
}
