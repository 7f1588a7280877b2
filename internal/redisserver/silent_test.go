package redisserver

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// A server that gives a new connection a reply of its own kind does not answer, and then the connections in the
// pool may be all there are.
func TestAServerAnswersAnewIfItTakesNewConnections(t *testing.T) {
	for reply, want := range map[string]bool{
		"+PONG\r\n":                            true,
		"-NOAUTH Authentication required.\r\n": true,
		"-NOPERM this user has no permissions to run the 'ping' command\r\n":   true,
		"-ERR max number of clients reached\r\n":                               false,
		"-LOADING Redis is loading the dataset in memory\r\n":                  false,
		"-MASTERDOWN Link with MASTER is down\r\n":                             false,
		"-DENIED Redis is running in protected mode because there is none\r\n": false,
		"HTTP/1.1 400 Bad Request\r\n":                                         false,
		"+PONG":                                                                false, // and no more
		"":                                                                     false,
	} {
		synctest.Test(t, func(t *testing.T) {
			o := &redis.Options{Dialer: func(context.Context, string, string) (net.Conn, error) {
				ours, its := net.Pipe()
				go func() { // ends with its connection
					defer its.Close()
					if n, err := its.Read(make([]byte, 100)); err != nil || n == 0 {
						return
					}
					time.Sleep(time.Second)
					_, _ = its.Write([]byte(reply))
					_, _ = its.Read(make([]byte, 1))
				}()
				return ours, nil
			}}
			began := time.Now()
			took, answers := answersAnew(t.Context(), o)
			if answers != want || answers && took != time.Second || time.Since(began) > 2*time.Second {
				t.Errorf("%q: %v after %v, in %v", reply, answers, took, time.Since(began))
			}
		})
	}
	refused := &redis.Options{Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") }}
	if _, answers := answersAnew(t.Context(), refused); answers {
		t.Error("no connection is taken for an answer")
	}
	unbounded := &redis.Options{Dialer: func(context.Context, string, string) (net.Conn, error) {
		ours, _ := net.Pipe()
		return endless{ours}, nil
	}}
	if _, answers := answersAnew(t.Context(), unbounded); answers {
		t.Error("a connection without a deadline answers")
	}
}

// endless is a connection that knows no deadlines.
type endless struct{ net.Conn }

func (endless) SetDeadline(time.Time) error { return os.ErrNoDeadline }

func TestTimedOut(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{context.DeadlineExceeded, true},
		{&net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}, true},
		{errTooLate{}, true},
		{ErrLateAnswer, true},
		{&net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}, false},
		{redis.ErrPoolTimeout, false},
		{errPoolExhausted{1}, false},
		{context.Canceled, false},
		{errors.New("ERR something"), false},
	} {
		if got := TimedOut(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

// muted is a connection on which nothing arrives once it is told so.
type muted struct {
	net.Conn
	deaf *atomic.Bool
}

func (c muted) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.deaf.Load() {
			return n, err
		}
	}
}

// Of the connections in the pool, those on which nothing arrives are discarded, and the others kept.
func TestSilentConnectionsAreDropped(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		const idle = mostPings + 20 // more than are sent a PING at once
		for _, dead := range []int{idle, 5, 0} {
			var made atomic.Int64
			var deaf, never atomic.Bool
			rdb := target.NewClient(t, func(o *redis.Options) {
				o.PoolSize, o.ContextTimeoutEnabled = idle+10, true
				direct := o.Dialer
				if direct == nil {
					direct = redis.NewDialer(o)
				}
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := direct(ctx, network, addr)
					if made.Add(1) > int64(dead) {
						return muted{conn, &never}, err
					}
					return muted{conn, &deaf}, err
				}
			})
			var all []*redis.Conn
			for range idle {
				conn := rdb.Conn()
				if err := conn.Ping(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				all = append(all, conn)
			}
			for _, conn := range all {
				_ = conn.Close()
			}
			s := New(rdb, target.Prefix)
			if n := s.DropSilent(t.Context(), "x"); n != 0 || rdb.PoolStats().IdleConns != idle {
				t.Errorf("%d connections that work are silent, and %d of %d are left", n, rdb.PoolStats().IdleConns, idle)
			}
			deaf.Store(true)
			n := s.DropSilent(t.Context(), "x")
			left := int(rdb.PoolStats().IdleConns)
			if dead == idle && (n != idle || left > mostPings) || dead == 0 && (n != 0 || left != idle) || n > dead {
				t.Errorf("of %d connections, of which %d are silent, %d were found, and %d are left", idle, dead, n, left)
			}
			if err := rdb.Ping(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		}
	})
}
