package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/examples/tracing/internal/query"
)

// needJaeger builds Jaeger if the environment asks for that, and else skips the test
// where it is not built yet.
func needJaeger(t *testing.T) {
	t.Helper()
	built, err := jaegerBuilt()
	switch {
	case err != nil:
		t.Fatal(err)
	case built:
	case os.Getenv("LEASED_REQUIRE_JAEGER") != "1":
		t.Skip("Jaeger is not built yet, which takes minutes: run make test-jaeger in the root, or LEASED_REQUIRE_JAEGER=1 go test -timeout 30m .")
	default:
		last := time.Now()
		if err := buildJaeger(t.Context(), func(format string, args ...any) {
			if time.Since(last) > 15*time.Second {
				last = time.Now()
				t.Logf(format, args...)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// The one promise that a span recorder inside a process cannot check: what a waiter
// in another process sent to a real Jaeger leads to the span of the holder.
func TestAWaitInJaegerLinksToTheHoldOfAnotherProcess(t *testing.T) {
	needJaeger(t)
	// The second order comes while the first is thought about. That is long, so that
	// what else takes time on a busy machine is little beside it.
	const think = 4 * time.Second
	w := newWorld(t, 2, think)

	orders := make(chan error, 2)
	send := func(i int) { // owned by the test, ended by the answer, waited for below
		status, text, err := w.services[i].order(t.Context(), order{Item: item, Pieces: 1})
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("order %d: %d %s", i, status, text)
		}
		orders <- err
	}
	go send(0)
	w.await("the first order is inside", func(info leased.Info) bool { return len(info.Owners) == 1 })
	go send(1)
	w.await("the second order waits", func(info leased.Info) bool { return info.Queue == 1 })
	for range 2 {
		if err := <-orders; err != nil {
			t.Fatal(err)
		}
	}
	first, second := w.traces()

	for _, o := range []placed{first, second} {
		if o.root == nil || o.wait == nil || o.hold == nil {
			t.Fatalf("the trace of %s lacks a span: %+v", o.who, o)
		}
		for _, s := range []*query.Span{o.wait, o.hold} {
			if o.trace.Parent(s) != o.root {
				t.Errorf("%s: the parent of %s is not the order's span", o.who, s.OperationName)
			}
			if !inside(s, o.root) {
				t.Errorf("%s: %s, from %v to %v, is not inside the order's span, from %v to %v", o.who, s.OperationName,
					s.Begin(), s.End(), o.root.Begin(), o.root.End())
			}
			if got := s.Tag("leased.lock"); got != lockName(item) {
				t.Errorf("%s: %s has leased.lock %q", o.who, s.OperationName, got)
			}
		}
		for _, name := range []string{"stock.read", "stock.decide", "stock.write"} {
			s := o.trace.Named(name)
			if s == nil || o.trace.Parent(s) != o.hold || !inside(s, o.hold) {
				t.Errorf("%s: %s is not a child of %s, and inside it", o.who, name, query.Hold)
			}
		}
		if o.hold.Took() < think {
			t.Errorf("%s: held for %v, but was thought about for %v", o.who, o.hold.Took(), think)
		}
		if got := o.wait.Tag("leased.wait.outcome"); got != "acquired" {
			t.Errorf("%s: wait ended %q, want acquired", o.who, got)
		}
		if got := o.hold.Tag("leased.hold.outcome"); got != "released" {
			t.Errorf("%s: hold ended %q, want released", o.who, got)
		}
	}

	// Who was let in by whom.
	if links := first.wait.Links(); len(links) != 0 {
		t.Errorf("the first found the lock free, and links to %v", links)
	}
	links := second.wait.Links()
	if want := (query.Reference{RefType: "FOLLOWS_FROM", TraceID: first.trace.TraceID, SpanID: first.hold.SpanID}); len(links) != 1 || links[0] != want {
		t.Fatalf("the second links to %+v, want the hold of the first: %+v", links, want)
	}
	if a, b := first.trace.Sender(first.hold), second.trace.Sender(second.wait); a != "orders-1" || b != "orders-2" {
		t.Errorf("the link leads from process %s to %s, want from orders-2 to orders-1", b, a)
	}
	if a, b := first.wait.Tag("leased.via"), second.wait.Tag("leased.via"); a != "free" || b != "direct" {
		t.Errorf("the lock came by %q and %q, want free and direct", a, b)
	}
	if a, b := first.hold.Tag("leased.token"), second.hold.Tag("leased.token"); len(a) == 0 || a >= b { // of one length
		t.Errorf("the tokens are %s and %s, want them to grow", a, b)
	}

	// How long: the second waited from its call until the first let go. The two ends
	// are a message apart, and each process's clock reading comes a little after what
	// it times, so either can be the earlier one.
	const apart = think / 4
	if gap := second.wait.End().Sub(first.hold.End()).Abs(); gap > apart {
		t.Errorf("the wait ended %v from the end of the hold, want less than %v", gap, apart)
	}
	rest := first.hold.End().Sub(second.wait.Begin()) // of the hold, when the second came
	if d := (second.wait.Took() - rest).Abs(); d > apart {
		t.Errorf("the second waited %v for a hold that had %v left", second.wait.Took(), rest)
	}
	if second.hold.Begin().Before(second.wait.End().Add(-time.Millisecond)) {
		t.Errorf("the hold began at %v, before its wait ended at %v", second.hold.Begin(), second.wait.End())
	}
}

// inside allows for what Jaeger cuts off: it keeps beginnings and durations in whole
// microseconds.
func inside(s, outer *query.Span) bool {
	const cut = 2 * time.Microsecond
	return !s.Begin().Before(outer.Begin().Add(-cut)) && !s.End().After(outer.End().Add(cut))
}

func TestOneCommandShowsALinkFromJaeger(t *testing.T) {
	needJaeger(t)
	file := filepath.Join(t.TempDir(), "trace.json")
	out := perform(t, "--orders", "6", "--think", "20ms", "--save", file)
	kept, err := query.Parse([]byte(readText(t, file)))
	if err != nil {
		t.Fatal(err)
	}
	if pairs := kept.Pairs(); len(kept.Data) != 2 || len(pairs) != 1 || !pairs[0].Between() {
		t.Errorf("--save kept %d traces with %d links, want two traces and the link; printed:\n%s", len(kept.Data), len(pairs), out)
	}
}

// world is a Jaeger, a Redis and processes of the service.
type world struct {
	t        *testing.T
	began    time.Time
	jaeger   *jaeger
	services []*service
	looker   *leased.Client // looks at the lock and never takes it
}

func newWorld(t *testing.T, services int, think time.Duration) *world {
	const prefix = "test:"
	ended := func(end func() error) {
		t.Cleanup(func() {
			if err := end(); err != nil {
				t.Error(err)
			}
		})
	}
	j, err := startJaeger(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ended(j.end)
	url, _, end, err := startRedis(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ended(end)
	rdb, err := connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	ended(rdb.Close)
	looker, err := leased.New(rdb, leased.WithKeyPrefix(lockPrefix(prefix)))
	if err != nil {
		t.Fatal(err)
	}
	ended(looker.Close)
	if err := fill(t.Context(), rdb, prefix, item, services); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, began: time.Now(), jaeger: j, looker: looker}
	for i := range services {
		s, err := startService(t.Context(), os.Stderr, setup{
			Instance: fmt.Sprintf("%s-%d", serviceName, i+1),
			Redis:    url, OTLP: j.otlp, Prefix: prefix, Think: think,
		})
		if err != nil {
			t.Fatal(err)
		}
		ended(s.end)
		w.services = append(w.services, s)
	}
	return w
}

// await returns once the lock is as wanted.
func (w *world) await(what string, wanted func(leased.Info) bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for ; ; <-tick.C {
		info, err := w.looker.Inspect(ctx, lockName(item))
		if err != nil {
			w.t.Fatalf("%s: %v", what, err)
		}
		if wanted(info) {
			return
		}
	}
}

// placed is an order as Jaeger has it.
type placed struct {
	who              string
	trace            *query.Trace
	root, wait, hold *query.Span
}

// traces returns the two orders in the order in which they were inside.
func (w *world) traces() (first, second placed) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), arriveFor)
	defer cancel()
	tick := time.NewTicker(batchFor / 2)
	defer tick.Stop()
	for {
		answer, err := query.Jaeger{URL: w.jaeger.url}.Since(ctx, serviceName, w.began, 10)
		if err == nil && complete(answer) == 2 {
			var orders []placed
			for _, t := range answer.Data {
				o := placed{trace: t, root: t.Named(orderSpan), wait: t.Named(query.Wait), hold: t.Named(query.Hold)}
				o.who = t.Sender(o.root)
				orders = append(orders, o)
			}
			if orders[1].hold.Begin().Before(orders[0].hold.Begin()) {
				orders[0], orders[1] = orders[1], orders[0]
			}
			return orders[0], orders[1]
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatalf("the traces are not in Jaeger after %v: %v", arriveFor, err)
		}
	}
}
