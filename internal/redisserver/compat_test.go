package redisserver

import (
	"bufio"
	"crypto/sha1" //nolint:gosec // the name Redis gives a script, no secret
	"encoding/hex"
	"flag"
	"fmt"
	"maps"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/protocol"
)

// While a fleet is upgraded, clients of two versions share locks. frozenDir holds the
// scripts that a released version sends, and its README.md says how they are joined and
// called.

var freeze = flag.Bool("compat.freeze", false, "overwrite the frozen scripts with today's: only before their version is released")

const (
	frozenDir = "testdata/scripts/v1"
	manifest  = "MANIFEST" // one line for each script: name, SHA-1 of the whole, its parts in order
)

// frozenParts names the files that version 1 joined into each script.
var frozenParts = map[string][]string{
	"acquire":      {"recheck_fast", "acquire_fast", "acquire_arguments", "common", "acquire"},
	"release":      {"release_fast", "release_arguments", "common", "release"},
	"yield":        {"common", "yield"},
	"downgrade":    {"common", "downgrade"},
	"cancel":       {"release_arguments", "common", "cancel"},
	"evict":        {"common", "evict"},
	"inspect":      {"common", "inspect"},
	"renew":        {"renew"},
	"renew_shared": {"renew_shared"},

	"adopt":          {"common", "adopt"},
	"vote_acquire":   {"vote_fast", "vote_before", "recheck_fast", "acquire_arguments", "common", "acquire", "vote_after"},
	"vote_yield":     {"vote_before", "common", "yield", "vote_after"},
	"vote_downgrade": {"vote_before", "common", "downgrade", "vote_after"},
	"vote_cancel":    {"release_fast", "release_arguments", "common", "cancel"},
}

var todays = map[string]Script{
	"acquire": AcquireScript, "release": ReleaseScript, "yield": YieldScript, "downgrade": DowngradeScript, "cancel": CancelScript,
	"evict": EvictScript, "inspect": InspectScript, "renew": RenewScript, "renew_shared": RenewSharedScript,
	"adopt": AdoptScript, "vote_acquire": VoteAcquireScript, "vote_yield": VoteYieldScript, "vote_downgrade": VoteDowngradeScript,
	"vote_cancel": VoteCancelScript,
}

// TestFreezeScripts does nothing without its flag:
//
//	go test ./internal/redisserver -run TestFreezeScripts -compat.freeze
func TestFreezeScripts(t *testing.T) {
	if !*freeze {
		t.Skip("run with -compat.freeze to overwrite " + frozenDir)
	}
	format := strings.TrimSuffix(strings.TrimPrefix(protocol.FormatTag, "leased"), ":")
	if dir := "testdata/scripts/v" + format; dir != frozenDir {
		t.Fatalf("today's format is %s: freeze it in %s, and keep %s", format, dir, frozenDir)
	}
	var lines strings.Builder
	for _, name := range slices.Sorted(maps.Keys(frozenParts)) {
		var whole []byte
		for _, part := range frozenParts[name] {
			text, err := scriptFiles.ReadFile("scripts/" + part + ".lua")
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(frozenDir, part+".lua"), text, 0o644); err != nil {
				t.Fatal(err)
			}
			whole = append(whole, text...)
		}
		if todays[name].Text != string(whole) {
			t.Fatalf("%s is not made of %v: correct frozenParts", name, frozenParts[name])
		}
		fmt.Fprintln(&lines, name, hash(whole), strings.Join(frozenParts[name], " "))
	}
	if err := os.WriteFile(filepath.Join(frozenDir, manifest), []byte(lines.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

func hash(text []byte) string {
	sum := sha1.Sum(text)
	return hex.EncodeToString(sum[:])
}

// frozen reads the scripts of version 1 and checks each against the manifest.
func frozen(t *testing.T) map[string]Script {
	t.Helper()
	f, err := os.Open(filepath.Join(frozenDir, manifest))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	scripts := map[string]Script{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 {
			t.Fatalf("malformed line %q", lines.Text())
		}
		var whole []byte
		for _, part := range fields[2:] {
			text, err := os.ReadFile(filepath.Join(frozenDir, part+".lua"))
			if err != nil {
				t.Fatal(err)
			}
			whole = append(whole, text...)
		}
		if sum := hash(whole); sum != fields[1] {
			t.Errorf("%s was edited: SHA-1 %s, frozen %s", fields[0], sum, fields[1])
		}
		scripts[fields[0]] = Script{string(whole), fields[1]}
	}
	return scripts
}

func TestTheFrozenScriptsAreWhatWasFrozen(t *testing.T) {
	scripts := frozen(t)
	for name := range frozenParts {
		if _, ok := scripts[name]; !ok {
			t.Errorf("%s is not in the manifest", name)
		}
	}
	files, err := filepath.Glob(frozenDir + "/*.lua")
	if err != nil || len(files) != 19 {
		t.Errorf("%d files, want 19: %v", len(files), err)
	}
}

// TestVersion1AndTodaysScriptsShareALock has client A speak one version and client B the other. After
// each of many random calls, it checks what must always hold. It does so on a server that is used alone,
// and on one of a quorum's, which has scripts of its own.
func TestVersion1AndTodaysScriptsShareALock(t *testing.T) {
	t.Parallel()
	old := frozen(t)
	for _, versions := range []map[string]map[string]Script{{"A": old, "B": nil}, {"A": nil, "B": old}} {
		for _, member := range []bool{false, true} {
			onScripts(t, func(t *testing.T, s *scene) {
				if member {
					s.srv = s.member()
				}
				p := newPair(t, s, versions)
				for seed := range scatterings() / 5 {
					p.run(seed)
				}
				p.clear()
			})
		}
	}
}

// TestVersion1AndTodaysScriptsOrderAQuorumsQueuesAlike has requests of both versions arrive at each of three
// servers in another order. Their tickets say who is next, and if the servers did not agree on that, nobody
// would get a majority.
func TestVersion1AndTodaysScriptsOrderAQuorumsQueuesAlike(t *testing.T) {
	t.Parallel()
	old := frozen(t)
	onScripts(t, func(t *testing.T, s *scene) {
		s.srv = s.member()
		for seed := range scatterings() / 10 {
			rng := rand.New(rand.NewSource(seed))
			ids := []string{s.writer("A")}
			tickets := map[string]uint64{ids[0]: someTicket}
			for i := range 8 {
				ids = append(ids, proved(rng, s.id(string("AB"[rng.Intn(2)]), protocol.Mode("wwr"[rng.Intn(3)]), long)))
				tickets[ids[i+1]] = someTicket + uint64(i+1)*ticketsApart
			}
			var orders [][]string
			for server := range 3 {
				one := *s
				one.keys, _ = protocol.NewKeys(s.prefix(), fmt.Sprint("y", server))
				callers := map[string]*speaker{"A": {s: &one, scripts: old}, "B": {s: &one}}
				for i, place := range append([]int{0}, rng.Perm(8)...) {
					id := ids[0]
					if i > 0 {
						id = ids[1+place]
					}
					want := protocol.Enqueued
					if i == 0 {
						want = protocol.Granted
					}
					what := []string{"acquire", "newcomer"}[rng.Intn(2)]
					if a := callers[client(id)].take(step{what: what, id: id, ticket: tickets[id]}, 0); a.Outcome != want {
						t.Fatalf("seed %d: %s: %+v", seed, id, a)
					}
				}
				orders = append(orders, one.look().queue)
				one.clear()
			}
			for _, order := range orders {
				if !slices.Equal(order, ids[1:]) {
					t.Fatalf("seed %d: the queues are\n%q\n%q\n%q", seed, orders[0], orders[1], orders[2])
				}
			}
		}
		s.raw("DEL", s.srv.mark)
	})
}
