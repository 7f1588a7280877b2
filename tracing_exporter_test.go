package leased_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/leasedmutex/leased"
)

// clogged is a span processor that blocks until it is freed, like an exporter without a
// batcher whose collector does not respond.
type clogged struct {
	freed chan struct{}
	ended atomic.Int64
}

func (s *clogged) OnStart(context.Context, sdk.ReadWriteSpan) {}

func (s *clogged) OnEnd(sdk.ReadOnlySpan) {
	select {
	case <-s.freed:
	case <-time.After(time.Minute): // or a test that waits for it would never end
	}
	s.ended.Add(1)
}

func (s *clogged) Shutdown(context.Context) error   { return nil }
func (s *clogged) ForceFlush(context.Context) error { return nil }

func TestAnExporterThatBlocksDelaysNoLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		blocked := &clogged{freed: make(chan struct{})}
		tp := sdk.NewTracerProvider(sdk.WithSpanProcessor(blocked))
		c := newClient(t, s, leased.WithTracerProvider(tp))
		other := newClient(t, s, leased.WithTracerProvider(tp))
		began := time.Now()
		const leases = 1000
		for range leases / 2 {
			unlock(t, lock(t, c.Mutex("x")))
			unlock(t, lock(t, other.Mutex("x")))
		}
		l := lock(t, c.Mutex("x"))
		s.rdb.Del(context.Background(), "x") // a loss is reported at once, too
		<-l.Context().Done()
		if err := l.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
			t.Error(err)
		}
		if took := time.Since(began); took > 11*time.Second {
			t.Errorf("it took %v", took)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := c.Shutdown(ctx); !errors.Is(err, leased.ErrClosed) || !strings.Contains(err.Error(), "spans") {
			t.Errorf("Shutdown does not say what it did not wait for: %v", err)
		}
		if n := blocked.ended.Load(); n != 0 {
			t.Errorf("%d spans exported", n)
		}
		close(blocked.freed)
		synctest.Wait()
		if n := blocked.ended.Load(); n != 2*(leases+1) {
			t.Errorf("%d spans exported in the end", n)
		}
	})
}

func TestSpansThatNobodyTakesAreDroppedAndThatIsLogged(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		blocked := &clogged{freed: make(chan struct{})}
		var log bytes.Buffer
		c := newClient(t, s, leased.WithTracerProvider(sdk.NewTracerProvider(sdk.WithSpanProcessor(blocked))),
			leased.WithIdleHold(time.Hour), leased.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		const leases = 6000
		for range leases {
			unlock(t, lock(t, c.Mutex("x")))
		}
		synctest.Wait()
		close(blocked.freed)
		synctest.Wait()
		if n := blocked.ended.Load(); n >= 2*leases || n < 8192 {
			t.Errorf("%d spans of %d were exported", n, 2*leases)
		}
		if n := strings.Count(log.String(), "spans and measurements of locks are dropped"); n != 1 {
			t.Errorf("%d lines in the log:\n%s", n, log.String())
		}
	})
}
