package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// logs keeps what a client logs above Debug.
type logs struct {
	mu    sync.Mutex // guards lines
	lines []slog.Record
}

func (l *logs) option() leased.Option { return leased.WithLogger(slog.New(l)) }

func (l *logs) Enabled(_ context.Context, level slog.Level) bool { return level > slog.LevelDebug }
func (l *logs) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *logs) WithGroup(string) slog.Handler                    { return l }

func (l *logs) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, r)
	return nil
}

// count returns how many lines of that level contain text.
func (l *logs) count(level slog.Level, text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, r := range l.lines {
		if r.Level == level && strings.Contains(r.Message, text) {
			n++
		}
	}
	return n
}

// messages returns all lines.
func (l *logs) messages() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for _, r := range l.lines {
		all = append(all, r.Level.String()+" "+r.Message)
	}
	return all
}

// stamps remembers when each command was sent. It is a Limiter, which go-redis
// asks before each command or pipeline, for a hook does not see the commands of
// a client that go-redis derived from its own.
type stamps struct {
	mu    sync.Mutex // guards times
	times []time.Time
}

func (st *stamps) Allow() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.times = append(st.times, time.Now())
	return nil
}

func (st *stamps) ReportResult(error) {}

func (st *stamps) all() []time.Time {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Clone(st.times)
}

var errCut = errors.New("the line is cut")

// line is the way from a client to an embedded server, which a test can cut. It
// works in virtual time, where a proxy does not.
type line struct {
	mu    sync.Mutex // guards what follows
	isCut bool
	conns []net.Conn
}

// onLine returns a client behind a line.
func onLine(t *testing.T, s place, opts ...leased.Option) (*leased.Client, *line) {
	t.Helper()
	l := &line{}
	rdb := s.connect(t, func(o *redis.Options) {
		direct := o.Dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.isCut {
				return nil, errCut
			}
			conn, err := direct(ctx, network, addr)
			if err == nil {
				l.conns = append(l.conns, conn)
			}
			return conn, err
		}
	})
	return clientOn(t, s, rdb, opts...), l
}

func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = true
	for _, conn := range slices.Backward(l.conns) {
		conn.Close()
	}
	l.conns = nil
}

func (l *line) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = false
}
