//go:build unix

package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// A figure of the page that changes has to change in the program as well, and the other way round.
func TestTheFiguresOfThePageAreThoseOfTheProgram(t *testing.T) {
	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	page := strings.Join(strings.Fields(string(text)), " ")
	flag := func(command, name string) string {
		c, _, err := newRoot(discard()).Find([]string{command})
		if err != nil {
			t.Fatal(err)
		}
		return c.Flags().Lookup(name).DefValue
	}
	for _, c := range []struct {
		sentence  string
		got, want any
	}{
		{"When a third of the TTL is left, COMMAND and everything it started get SIGTERM", termMargin(30 * time.Second), 10 * time.Second},
		{"when a tenth is left, SIGKILL", killMargin(30 * time.Second), 3 * time.Second},
		{"With the default TTL that is 20 s and 27 s after Redis last answered", flag("run", "ttl"), "30s"},
		{"does not answer at the start, `leased run` ends with status 69: after five seconds", connectTime, 5 * time.Second},
		{"does not answer for more than five seconds, it says why", lastingTrouble, 5 * time.Second},
		{"`doctor` also opens 12 connections at once", probes, 12},
		{"that take more than 50 ms on average", slowCommand, 50 * time.Millisecond},
		{"on average of at least 10 calls", enoughCalls, 10},
		{"find locks by SCAN (100 keys a call, and never KEYS)", scanCount, 100},
		{"A refresh of `top` costs at most 300 calls of SCAN", topScans, 300},
		{"5,000 single EXISTS (always single in a Cluster)", topChecks, 5000},
		{"and queries about 200 locks", topLooks, 200},
		{"`ls` lists 1,000 locks unless `--limit` says otherwise", flag("ls", "limit"), "1000"},
	} {
		if !strings.Contains(page, c.sentence) {
			t.Errorf("the page does not say %q", c.sentence)
		}
		if c.got != c.want {
			t.Errorf("the page says %q, and here it is %v, not %v", c.sentence, c.got, c.want)
		}
	}
	for _, bounds := range []string{"from 1 s to 24 h |", "up to `720h`;"} { // of the test below
		if !strings.Contains(page, bounds) {
			t.Errorf("the page does not say %q", bounds)
		}
	}
}

func TestRunTakesDurationsUpToTheBoundsOfThePage(t *testing.T) {
	for _, c := range []struct {
		flag  string
		taken bool
	}{
		{"--ttl=999ms", false},
		{"--ttl=1s", true},
		{"--ttl=1001ms", true},
		{"--ttl=24h", true},
		{"--ttl=24h0m0.001s", false},
		{"--at-least=0s", true},
		{"--at-least=720h", true},
		{"--at-least=720h0m0.001s", false},
	} {
		got := invoke(t, "run", c.flag, "job", "--", "no-such-command") // which is looked for next
		if taken := got.status == statusRunUnavailable && strings.Contains(got.err, "no-such-command"); taken != c.taken {
			t.Errorf("run %s: %+v", c.flag, got)
		}
	}
}

func TestListAsksOneByOneOnlyAboutLocksInUse(t *testing.T) {
	rdb := redistest.Server(t).Client()
	remember(t, rdb, "request:%d", 20_000)
	take(t, rdb, "", "a", "b", "c")
	rdb.ConfigResetStat(t.Context())
	got := invoke(t, "ls", "--redis", rdb.Options().Addr)
	if got.status != 0 || strings.Join(names(got.out), " ") != "a b c" {
		t.Errorf("%+v", got)
	}
	scans, _ := commandStats(t, rdb, "scan")
	checks, _ := commandStats(t, rdb, "exists")
	looks, _ := commandStats(t, rdb, "eval")
	again, _ := commandStats(t, rdb, "evalsha")
	// Where the locks are held that a call of SCAN found, an EXISTS for each of the call's follows. The clients
	// that hold them may send a script or two.
	if checks > scans+3*2*scanCount || looks+again > 100 {
		t.Errorf("%d calls of SCAN, %d of EXISTS, %d of scripts", scans, checks, looks+again)
	}
}

func TestTopSendsNoMoreForAPictureThanThePageSays(t *testing.T) {
	for _, held := range []bool{false, true} {
		rdb := redistest.Server(t).Client()
		if remember(t, rdb, "job:%d", 50_000); held {
			hold(t, rdb, "job:%d", 50_000)
		}
		rdb.ConfigResetStat(t.Context())
		if err := newTop(rdb, "", "*").refresh(t.Context(), time.Now()); err != nil {
			t.Fatal(err)
		}
		scans, _ := commandStats(t, rdb, "scan")
		checks, _ := commandStats(t, rdb, "exists")
		looks, _ := commandStats(t, rdb, "eval")
		again, _ := commandStats(t, rdb, "evalsha")
		// A call of SCAN may return some names more than it was asked for.
		if least := topChecks + scans; held && (scans >= 300 || checks < least || checks > least+2*scanCount || looks+again < 200 || looks+again > 201) {
			t.Errorf("of held locks: %d calls of SCAN, %d of EXISTS, %d of scripts", scans, checks, looks+again)
		}
		if !held && (scans != 300 || checks != 300 || looks+again != 0) {
			t.Errorf("of free locks: %d calls of SCAN, %d of EXISTS, %d of scripts", scans, checks, looks+again)
		}
	}
}
