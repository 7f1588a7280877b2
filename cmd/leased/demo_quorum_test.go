package main

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

func TestTheDemoOnAQuorumSellsTheStockAlthoughServersDie(t *testing.T) {
	redistest.CheckLeaks(t, nil, "")
	got := invoke(t, "demo", "--quorum", "--workers", "3", "--buyers", "4", "--stock", "6")
	if got.status != 0 || got.err != "" {
		t.Fatalf("status %d, stderr %q, stdout:\n%s", got.status, got.err, got.out)
	}
	rest := got.out
	for _, want := range []string{
		"on five more servers",
		"has read a stock of 4. Of 5 servers, 5 answer, and 5 name demo-process-",
		"Servers 2 and 4 die with all they knew. Of 5 servers, ",
		"The sale went on without them, down to a stock of 2. Of 5 servers, ",
		"Servers 2 and 4 are back, empty.",
		`6 sold from a stock of 6, 6 told "sold out". Redis says 0 are left.`,
		"taken 12 times",
		"How many of the 5 servers stood behind the leases when they were unlocked:",
	} {
		_, after, found := strings.Cut(rest, want)
		if !found {
			t.Fatalf("no %q at its place in:\n%s", want, got.out)
		}
		rest = after
	}
	n := 0
	for _, line := range regexp.MustCompile(`(\d+)  leases: `).FindAllStringSubmatch(rest, -1) {
		leases, err := strconv.Atoi(line[1])
		if err != nil {
			t.Fatal(err)
		}
		n += leases
	}
	if n != 12 {
		t.Errorf("12 buyers were inside:\n%s", rest)
	}
}

func TestASaleOnAQuorumThatWasDisturbedIsJudgedAsAnyOther(t *testing.T) {
	redistest.CheckLeaks(t, nil, "")
	d, _ := begun(t, []string{"--quorum", "--workers", "2", "--buyers", "3", "--stock", "4", "--ttl", "6s"})
	s, err := d.sell(t.Context(), order{Lock: true, PauseAt: []int{3, 2}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.verdict(); err != nil {
		t.Error(err)
	}
	if !s.without || !s.returned || s.soldCount() != 4 || s.refusedCount() != 2 {
		t.Errorf("servers died: %v, came back: %v, %d sold, %d refused", s.without, s.returned, s.soldCount(), s.refusedCount())
	}
	// A demo that is killed now leaves a buyer's leave to go on.
	if err := d.disturb(t.Context(), s, event{}); err != nil {
		t.Fatal(err)
	}
	for _, key := range d.server.Keys() {
		if !slices.Contains(keys(d.prefix), key) || d.server.TTL(key) == 0 {
			t.Errorf("the demo left %s, which expires in %v, and would delete %q", key, d.server.TTL(key), keys(d.prefix))
		}
	}
	if !d.server.Exists(goOnKey(d.prefix)) {
		t.Error("nobody is told to go on")
	}
	s.parts[0].sold = append(s.parts[0].sold, message{Seen: 1, Token: 1})
	if err := s.verdict(); err == nil {
		t.Error("one piece more is no matter")
	}
}

func TestTheDemoOnAQuorumRefusesWhatMeansNothingThere(t *testing.T) {
	for _, flags := range [][]string{
		{"--redis", "127.0.0.1:1"}, {"--kill"}, {"--fence"}, {"--stock", "2"}, {"--workers", "1", "--buyers", "2"},
	} {
		if got := invoke(t, append([]string{"demo", "--quorum"}, flags...)...); got.status != 2 || !strings.Contains(got.err, "--quorum") {
			t.Errorf("%q: status %d, %q", flags, got.status, got.err)
		}
	}
}
