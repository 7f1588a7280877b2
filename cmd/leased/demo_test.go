package main

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased/internal/redistest"
)

// onServers runs f with the embedded server and with a real one of its own, where
// there is redis-server. leftovers lists what the demo left in the real one.
func onServers(t *testing.T, f func(t *testing.T, flags []string, leftovers func() []string)) {
	t.Run("embedded", func(t *testing.T) {
		redistest.CheckLeaks(t, nil, "")
		f(t, nil, func() []string { return nil })
	})
	t.Run("redis", func(t *testing.T) {
		in := redistest.Server(t)
		rdb := in.Client()
		redistest.CheckLeaks(t, nil, "")
		f(t, []string{"--redis", "redis://" + in.Addr}, func() []string {
			left, err := redistest.Keys(context.Background(), rdb, "")
			if err != nil {
				t.Fatal(err)
			}
			return left
		})
	})
}

// figure returns the number that the pattern's group finds in text.
func figure(t *testing.T, text, pattern string) int {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("nothing like %q in:\n%s", pattern, text)
	}
	n, err := strconv.Atoi(found[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestTheDemoOversellsWithoutTheLockAndNotWithIt(t *testing.T) {
	onServers(t, func(t *testing.T, flags []string, leftovers func() []string) {
		got := invoke(t, append([]string{"demo", "--workers", "3", "--buyers", "4", "--stock", "5"}, flags...)...)
		if got.status != 0 || got.err != "" {
			t.Fatalf("status %d, stderr %q, stdout:\n%s", got.status, got.err, got.out)
		}
		if n := figure(t, got.out, `(\d+) sold from a stock of 5: `); n <= 5 {
			t.Errorf("%d sold without the lock", n)
		}
		if !strings.Contains(got.out, `5 sold from a stock of 5, 7 told "sold out". Redis says 0 are left.`) {
			t.Errorf("the sale with the lock is not reported in:\n%s", got.out)
		}
		local := figure(t, got.out, `(\d+)  local hand-offs`)
		direct := figure(t, got.out, `(\d+)  direct hand-offs`)
		asked := figure(t, got.out, `(\d+)  by asking Redis`)
		if figure(t, got.out, `taken (\d+) times`) != 12 || local+direct+asked != 12 || asked < 1 {
			t.Errorf("12 buyers were inside: %d local, %d direct, %d asked", local, direct, asked)
		}
		if n := figure(t, got.out, `(\d+) Redis commands in all`); n < direct+asked {
			t.Errorf("%d commands for %d grants", n, direct+asked)
		}
		if strings.ContainsAny(got.out, "\r\x1b") {
			t.Errorf("not a terminal, but the output has control characters: %q", got.out)
		}
		if left := leftovers(); len(left) > 0 {
			t.Errorf("left in Redis: %q", left)
		}
	})
}

// begun is a demo that is ready to sell. finish ends it, which the end of the test
// does too.
func begun(t *testing.T, args []string) (d *demo, finish func()) {
	t.Helper()
	std := discard()
	var options demoOptions
	c := &cobra.Command{}
	options.bind(c)
	if err := c.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	d = &demo{options: options, screen: newScreen(std.out)}
	finish = sync.OnceFunc(func() {
		if err := d.end(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(finish)
	if err := d.begin(t.Context(), std.err); err != nil {
		t.Fatal(err)
	}
	return d, finish
}

func TestASaleWithoutTheLockWouldNotPass(t *testing.T) {
	redistest.CheckLeaks(t, nil, "")
	d, _ := begun(t, []string{"--workers", "2", "--buyers", "5", "--stock", "5"})
	s, err := d.sell(t.Context(), order{})
	if err != nil {
		t.Fatal(err)
	}
	if s.soldCount()+s.refusedCount() != 10 {
		t.Errorf("10 buyers: %d sold, %d refused", s.soldCount(), s.refusedCount())
	}
	if err := d.withLock(s); err == nil {
		t.Error("the verdict on an oversold stock is good")
	}
}

func TestAfterAKillingTheOthersGoOnWhenTheLeaseEnds(t *testing.T) {
	onServers(t, func(t *testing.T, flags []string, leftovers func() []string) {
		args := append([]string{"--kill", "--ttl", "2s", "--workers", "3", "--buyers", "4", "--stock", "6"}, flags...)
		d, finish := begun(t, args)
		s, err := d.sell(t.Context(), order{Lock: true, HoldAt: 3})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.verdict(); err != nil {
			t.Error(err)
		}
		k := s.killed
		if k == nil {
			t.Fatal("nobody was killed")
		}
		if k.left <= 0 || k.left > 2*time.Second {
			t.Errorf("the killed lease had %v left of 2s", k.left)
		}
		// left was read after the kill and rounded down; no sale fits in between.
		if k.next < k.left {
			t.Errorf("next sale %v after the kill, but the lease had %v left", k.next, k.left)
		}
		if k.next > k.left+5*time.Second {
			t.Errorf("next sale %v after the kill, long after the lease's end in %v", k.next, k.left)
		}
		if n := s.soldCount(); n != 6 || s.died() < 1 || s.died() > 4 {
			t.Errorf("%d sold, %d buyers died", n, s.died())
		}
		finish()
		if left := leftovers(); len(left) > 0 {
			t.Errorf("left in Redis: %q", left)
		}
	})
}

func TestTheKillingIsToldStepByStep(t *testing.T) {
	redistest.CheckLeaks(t, nil, "")
	got := invoke(t, "demo", "--kill", "--ttl", "1s", "--workers", "2", "--buyers", "3", "--stock", "2")
	if got.status != 0 {
		t.Fatalf("status %d, stderr %q, stdout:\n%s", got.status, got.err, got.out)
	}
	rest := got.out
	for _, want := range []string{
		"has read a stock of 1 and not yet written: killed.",
		"Its lease has ",
		"next sale ",
		"2 sold from a stock of 2",
		"died with process",
		"killed\n",
	} {
		_, after, found := strings.Cut(rest, want)
		if !found {
			t.Fatalf("no %q at its place in:\n%s", want, got.out)
		}
		rest = after
	}
}

func TestAProcessThatDiesByItselfEndsTheDemo(t *testing.T) {
	redistest.CheckLeaks(t, nil, "")
	d, _ := begun(t, []string{"--workers", "2", "--ttl", "2s"})
	if err := d.workers.processes[1].kill(); err != nil {
		t.Fatal(err)
	}
	_, err := d.sell(t.Context(), order{Lock: true})
	if err == nil || !strings.Contains(err.Error(), "process 2") {
		t.Fatalf("sell returns %v", err)
	}
}
