package redisserver

import (
	"bufio"
	"context"
	"crypto/sha1" //nolint:gosec // the name Redis gives a script, no secret
	"encoding/hex"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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
	todays := map[string]Script{
		"acquire": AcquireScript, "release": ReleaseScript, "yield": YieldScript, "downgrade": DowngradeScript, "cancel": CancelScript,
		"evict": EvictScript, "inspect": InspectScript, "renew": RenewScript, "renew_shared": RenewSharedScript,
		"adopt": AdoptScript, "vote_acquire": VoteAcquireScript, "vote_yield": VoteYieldScript, "vote_downgrade": VoteDowngradeScript,
		"vote_cancel": VoteCancelScript,
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

// speaker runs the scripts of one version, and parses the replies that both versions have in
// common.
type speaker struct {
	s       *scene
	scripts map[string]Script // nil: today's, through Server
}

// take runs a step and returns its outcome, and the token if there is one.
func (c *speaker) take(st step, last uint64) (protocol.Outcome, uint64) {
	c.s.t.Helper()
	if c.scripts == nil {
		return c.today(st, last)
	}
	names := c.s.keys.All()
	all, id, ttl := names[:], st.id, Milliseconds(ttlOf(c.s.t, st.id))
	token := strconv.FormatUint(last, 10)
	run := func(name string, keys []any, args ...any) any {
		sc := c.scripts[name]
		val, err := c.s.srv.run(context.Background(), &sc, keys, args...)
		if err != nil {
			c.s.t.Fatalf("version 1: %+v: %v", st, err)
		}
		return val
	}
	var reply any
	switch inboxes := c.s.srv.Inboxes; st.what {
	case "acquire", "try", "newcomer", "question":
		wait := map[string]string{"acquire": "1", "try": "0", "newcomer": "2", "question": "4"}[st.what]
		reply = run("acquire", all, id, ttl, wait+" "+inboxes)
		if text, ok := reply.(string); ok {
			n, err := strconv.ParseUint(text, 10, 53)
			if err != nil {
				c.s.t.Fatalf("version 1: %+v: %v", st, err)
			}
			return protocol.Granted, n
		}
	case "release":
		reply = run("release", all, withCooldown(st.cool, id, "- "+inboxes, token)...)
		if _, ok := reply.(int64); ok {
			return protocol.Done, 0
		}
	case "yield":
		reply = run(st.what, all, withCooldown(st.cool, inboxes, id, st.next, token, "-")...)
	case "downgrade":
		reply = run(st.what, all, inboxes, id, st.next, token, "-")
	case "cancel":
		reply = run("cancel", all, withCooldown(st.cool, id, "- "+inboxes, token)...)
	case "renew":
		name, keys := "renew", all[:1]
		if strings.HasPrefix(id, "leased1:r") {
			name, keys = "renew_shared", []any{all[0], all[2]}
		}
		if run(name, keys, id, ttl) == int64(0) {
			return protocol.NotOurs, 0
		}
		return protocol.Granted, 0
	}
	list, _ := reply.([]any)
	if len(list) < 2 {
		c.s.t.Fatalf("version 1: %+v: malformed %v", st, reply)
	}
	if _, short := list[0].(string); short { // a shortcut's answer to a request that waits
		return protocol.Enqueued, 0
	}
	code, _ := list[0].(int64)
	n, _ := list[1].(int64)
	return map[int64]protocol.Outcome{1: protocol.Granted, 2: protocol.Enqueued, 3: protocol.Refused, 4: protocol.NotOurs, 5: protocol.Done}[code], uint64(n)
}

func (c *speaker) today(st step, last uint64) (protocol.Outcome, uint64) {
	var a protocol.Answer
	var err error
	switch st.what {
	case "acquire", "try":
		ask := c.s.acquireOf(st.id)
		ask.Wait = st.what == "acquire"
		a, err = c.s.do(ask)
	case "newcomer":
		a, err = c.s.do(c.s.newcomer(st.id))
	case "question":
		a, err = c.s.do(c.s.questionOf(st.id))
	case "release":
		a, err = c.s.do(protocol.Command{Verb: protocol.Release, ID: st.id, Last: last, Cooldown: st.cool})
	case "yield":
		a, err = c.s.do(protocol.Command{Verb: protocol.Yield, ID: st.id, Next: st.next, Last: last, Cooldown: st.cool})
	case "downgrade":
		a, err = c.s.do(protocol.Command{Verb: protocol.Downgrade, ID: st.id, Next: st.next, Last: last})
	case "cancel":
		err = c.s.tryCancel(st.id, last, st.cool)
		a.Outcome = protocol.Done
	case "renew":
		r := c.s.renewal(st.id)
		a.Outcome, err = r.Outcome, r.Err
	}
	if err != nil {
		c.s.t.Fatalf("today's: %+v: %v", st, err)
	}
	return a.Outcome, a.Token
}

// evict evicts the owners and returns them.
func (c *speaker) evict() []string {
	c.s.t.Helper()
	if c.scripts == nil {
		return c.s.evict()
	}
	names, sc := c.s.keys.All(), c.scripts["evict"]
	val, err := c.s.srv.run(context.Background(), &sc, names[:], c.s.srv.Inboxes)
	if err != nil {
		c.s.t.Fatalf("version 1: evict: %v", err)
	}
	_, told, _, owners, err := parseEviction(val)
	if err != nil || told != len(owners) {
		c.s.t.Fatalf("version 1: evict: malformed %v", val)
	}
	return owners
}

// TestVersion1AndTodaysScriptsShareALock has client A speak one version and client B the other. After
// each of many random calls, it checks what must always hold.
func TestVersion1AndTodaysScriptsShareALock(t *testing.T) {
	t.Parallel()
	old := frozen(t)
	for _, versions := range []map[string]map[string]Script{{"A": old, "B": nil}, {"A": nil, "B": old}} {
		onScripts(t, func(t *testing.T, s *scene) {
			p := &pair{t: t, s: s, inbox: map[string]*listener{"A": s.listen("A"), "B": s.listen("B")}}
			p.callers = map[string]*speaker{"A": {s, versions["A"]}, "B": {s, versions["B"]}}
			for seed := range scatterings() / 10 {
				p.run(seed)
			}
		})
	}
}
