package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// take acquires locks and keeps them until the test ends.
func take(t *testing.T, rdb redis.UniversalClient, prefix string, names ...string) {
	t.Helper()
	client, err := leased.New(rdb, leased.WithKeyPrefix(prefix), leased.WithOwner("worker-1"))
	if err != nil {
		t.Fatal(err)
	}
	var leases []*leased.Lease
	for _, name := range names {
		lease, err := client.Mutex(name).LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, lease)
	}
	t.Cleanup(func() {
		for _, lease := range leases {
			lease.Unlock()
		}
		client.Close()
	})
}

// names returns the first column of a table without its head.
func names(out string) []string {
	var found []string
	for i, line := range strings.Split(strings.TrimSpace(out), "\n") {
		if i > 0 && line != "" {
			found = append(found, strings.Fields(line)[0])
		}
	}
	return found
}

func TestLsListsTheLocksOfAPrefixThatMatch(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, s redistest.Target) {
		rdb := s.NewClient(t)
		take(t, rdb, s.Prefix, "invoice:1", "invoice:2", "{cart}:7", "invoice", "job*")
		free, err := leased.New(rdb, leased.WithKeyPrefix(s.Prefix))
		if err != nil {
			t.Fatal(err)
		}
		defer free.Close()
		if err := free.Mutex("free").Do(t.Context(), func(context.Context) error { return nil }); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct{ args, want string }{
			{"", "invoice invoice:1 invoice:2 job* {cart}:7"},
			{"*", "invoice invoice:1 invoice:2 job* {cart}:7"},
			{"invoice", "invoice"},
			{"invoice:*", "invoice:1 invoice:2"},
			{"invoice:[2-9]", "invoice:2"},
			{"*cart*", "{cart}:7"},
			{`job\*`, "job*"},
			{"f*", ""},
			{"--all f*", "free"},
		} {
			got := invoke(t, append([]string{"ls", "--redis", s.Addr, "--prefix", s.Prefix}, strings.Fields(c.args)...)...)
			if found := strings.Join(names(got.out), " "); got.status != 0 || (got.err == "") != (c.want != "") || found != c.want {
				t.Errorf("leased ls %s: status %d, %q, %q; want %q", c.args, got.status, found, got.err, c.want)
			}
		}
		got := invoke(t, "ls", "--limit", "2", "--redis", s.Addr, "--prefix", s.Prefix)
		if len(names(got.out)) != 2 || !strings.Contains(got.err, "more than 2") {
			t.Errorf("with a limit: %q, %q", got.out, got.err)
		}
		var one jsonInfo
		got = invoke(t, "ls", "--json", "{cart}*", "--redis", s.Addr, "--prefix", s.Prefix)
		if err := json.Unmarshal([]byte(got.out), &one); err != nil || one.Name != "{cart}:7" || one.State != "held" ||
			len(one.Owners) != 1 || one.Owners[0].Client != "worker-1" || one.Owners[0].Left == nil || *one.Owners[0].Left < 20 || one.Owners[0].Since == nil || one.Token == 0 {
			t.Errorf("as JSON: %q, %v", got.out, err)
		}
	})
}

// commandStats returns the calls of a command and the microseconds they took on average.
func commandStats(t *testing.T, rdb *redis.Client, command string) (calls int, each float64) {
	t.Helper()
	info, err := rdb.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(info) {
		if rest, ok := strings.CutPrefix(line, "cmdstat_"+command+":"); ok {
			for field := range strings.SplitSeq(strings.TrimSpace(rest), ",") {
				name, value, _ := strings.Cut(field, "=")
				switch name {
				case "calls":
					calls, _ = strconv.Atoi(value)
				case "usec_per_call":
					each, _ = strconv.ParseFloat(value, 64)
				}
			}
		}
	}
	return calls, each
}

func TestAMillionOtherKeysAreReadInSmallSteps(t *testing.T) {
	others := 1_000_000
	if testing.Short() {
		others = 100_000
	}
	in := redistest.Server(t)
	rdb := in.Client()
	fill := redis.NewScript(`for i = ARGV[1], ARGV[2] do redis.call('SET', 'other:' .. i, 'x') end return 1`)
	for from := 0; from < others; from += 20_000 {
		if err := fill.Run(t.Context(), rdb, nil, from, from+19_999).Err(); err != nil {
			t.Fatal(err)
		}
	}
	take(t, rdb, "", "a", "b", "c")
	const slow = 1000 // µs
	for _, args := range [][]string{{"ls"}, {"top", "--count", "2", "--interval", "50ms"}} {
		rdb.ConfigSet(t.Context(), "slowlog-log-slower-than", strconv.Itoa(slow))
		rdb.ConfigSet(t.Context(), "slowlog-max-len", "10000")
		rdb.Do(t.Context(), "SLOWLOG", "RESET")
		rdb.ConfigResetStat(t.Context())
		got := invoke(t, append(args, "--redis", in.Addr)...)
		if got.status != 0 {
			t.Fatalf("%v: %+v", args, got)
		}
		calls, each := commandStats(t, rdb, "scan")
		keys, _ := commandStats(t, rdb, "keys")
		if args[0] == "ls" && (calls < others/100*3/4 || calls > others/100*2 || strings.Join(names(got.out), " ") != "a b c") {
			t.Errorf("ls: %d calls of SCAN, printed %q", calls, got.out)
		}
		if args[0] == "top" && calls != 2*300 {
			t.Errorf("top: %d calls of SCAN for two pictures, each of which needs more than the 300 that are allowed", calls)
		}
		if keys > 0 || each > slow/2 {
			t.Errorf("%v: KEYS was called %d times, SCAN took %.0f µs", args, keys, each)
		}
		// The server's thread may have lost the processor in between, which the log does not
		// tell from work. Work of that length would show in nearly every call.
		logged, err := rdb.SlowLogGet(t.Context(), -1).Result()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%v: %d calls of SCAN of %.0f µs, %d commands of more than %d µs", args, calls, each, len(logged), slow)
		if len(logged) > 5+calls/20 {
			t.Errorf("%v: of %d commands %d took more than %d µs, such as %v", args, calls, len(logged), slow, logged[0].Args)
		}
	}
}

// waits has a client wait for a lock until the test ends.
func waits(t *testing.T, client *leased.Client, name string) {
	ctx, cancel := context.WithCancel(context.Background())
	var waiting sync.WaitGroup
	waiting.Go(func() { client.Mutex(name).LockContext(ctx) }) // ended by cancel
	t.Cleanup(func() {
		cancel()
		waiting.Wait()
		client.Close()
	})
}

func TestTopShowsQueuesAndHowLongTheyWereSeen(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	take(t, rdb, "", "busy", "quiet")
	other, err := leased.New(rdb, leased.WithOwner("waiter"))
	if err != nil {
		t.Fatal(err)
	}
	waits(t, other, "busy")
	eventually(t, "the waiter queues", func() bool { return m.Exists("busy:{busy}:queue") })
	top := newTop(rdb, "", "*")
	now := time.Now()
	if err := top.refresh(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if err := top.refresh(t.Context(), now.Add(90*time.Second)); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	top.show(&out, now.Add(90*time.Second), 0)
	lines := strings.Split(out.String(), "\n")
	if lines[0] != "2 locks held or waited for, 1 process waiting" || len(lines) != 5 {
		t.Fatalf("printed:\n%s", out.String())
	}
	first, second := strings.Fields(lines[2]), strings.Fields(lines[3])
	if first[0] != "busy" || first[2] != "worker-1" || first[3] != "1" || first[4] != "90s" || second[0] != "quiet" || second[4] != "-" {
		t.Errorf("printed:\n%s", out.String())
	}
}

// While old and new programs use one lock, a client of Leased waits for one that no such client has had yet.
func TestALockThatOnlyAnotherLibraryHasHadIsListedWhileSomebodyWaits(t *testing.T) {
	redistest.OnBoth(t, func(t *testing.T, s redistest.Target) {
		rdb := s.NewClient(t)
		for _, name := range []string{"alone", "old", "{old}:tagged"} {
			if err := rdb.Set(t.Context(), s.Prefix+name, "of another library", time.Minute).Err(); err != nil {
				t.Fatal(err)
			}
		}
		other, err := leased.New(rdb, leased.WithKeyPrefix(s.Prefix))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"old", "{old}:tagged"} {
			waits(t, other, name)
			keys, err := protocol.NewKeys(s.Prefix, name)
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the waiter queues", func() bool { return rdb.Exists(t.Context(), keys.Queue()).Val() == 1 })
		}
		got := invoke(t, "ls", "--redis", s.Addr, "--prefix", s.Prefix)
		if found := strings.Join(names(got.out), " "); got.status != 0 || found != "old {old}:tagged" || !strings.Contains(got.out, "(another library)") {
			t.Errorf("ls: %+v", got)
		}
		summary, rows, _ := picture(t, newTop(rdb, s.Prefix, "*"))
		if summary != "2 locks held or waited for, 2 processes waiting" || rows["old"] == nil || rows["{old}:tagged"] == nil {
			t.Errorf("top: %s: %q", summary, rows)
		}
	})
}

// A client that gives up and asks again has two requests in the queue until the cancel of the first has
// arrived.
func TestTopCountsOnlyTheLastRequestOfAWaitingClient(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	take(t, rdb, "", "busy")
	other, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	waits(t, other, "busy")
	const queue = "busy:{busy}:queue"
	eventually(t, "the waiter queues", func() bool { return m.Exists(queue) })
	who, err := protocol.ParseID(rdb.ZRange(t.Context(), queue, 0, 0).Val()[0])
	if err != nil {
		t.Fatal(err)
	}
	earlier := protocol.NewRequest(who.Client, protocol.Exclusive, time.Minute, false, protocol.Unproved, protocol.Origin{}).ID
	for key, score := range map[string]float64{queue: 0, "busy:{busy}:waiters": float64(time.Now().Add(time.Hour).UnixMilli())} {
		if err := rdb.ZAdd(t.Context(), key, redis.Z{Score: score, Member: earlier}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	top := newTop(rdb, "", "*")
	if summary, rows, _ := picture(t, top); summary != "1 lock held or waited for, 1 process waiting" || rows["busy"][3] != "1" {
		t.Errorf("it shows %q: %s", rows["busy"], summary)
	}
	if seen := top.locks["busy"].waiting; len(seen) != 1 {
		t.Errorf("it takes the wait from %d requests", len(seen))
	}
}

func TestInAPipeNothingIsColoredOrRewritten(t *testing.T) {
	m := redistest.MiniTCP(t)
	take(t, redistest.MiniClient(t, m), "", "a")
	t.Setenv("COLUMNS", "40")
	for _, line := range []string{"ls", "top --count 2 --interval 50ms", "inspect a", "doctor"} {
		got := invoke(t, append(strings.Fields(line), "--redis", m.Addr())...)
		if got.status != 0 || strings.ContainsAny(got.out, "\r\x1b") {
			t.Errorf("leased %s: %+v", line, got)
		}
		for text := range strings.Lines(got.out) {
			if columns(strings.TrimSpace(text)) > 40 {
				t.Errorf("leased %s with COLUMNS=40 prints %q", line, text)
			}
		}
	}
}

func TestInAPipeNamesAreWhole(t *testing.T) {
	m := redistest.MiniTCP(t)
	name := strings.Repeat("shop:", 40) + "2"
	take(t, redistest.MiniClient(t, m), "", name)
	t.Setenv("COLUMNS", "")
	for _, line := range []string{"ls", "top --count 1"} {
		got := invoke(t, append(strings.Fields(line), "--redis", m.Addr())...)
		if found := strings.Join(names(got.out), " "); got.status != 0 || !strings.Contains(found, name) || !strings.Contains(got.out, "worker-1") {
			t.Errorf("leased %s without COLUMNS: %+v", line, got)
		}
	}
	if got := invoke(t, "inspect", name, "--redis", m.Addr()); got.status != 0 || !strings.Contains(got.out, ", since ") || strings.Count(got.out, "\n") != 4 {
		t.Errorf("leased inspect without COLUMNS breaks lines: %+v", got)
	}
	for _, line := range []string{"help run", "doctor --redis " + m.Addr()} {
		for text := range strings.Lines(invoke(t, strings.Fields(line)...).out) {
			if columns(strings.TrimSpace(text)) > 80 {
				t.Errorf("leased %s without COLUMNS prints %q", line, text)
			}
		}
	}
}

func TestTimesHaveTheirZone(t *testing.T) {
	local := time.Local
	t.Cleanup(func() { time.Local = local })
	time.Local = time.FixedZone("somewhere", 5*3600+1800)
	if got := instant(time.Unix(0, 0)); got != "1970-01-01 05:30:00.000 +05:30" {
		t.Error(got)
	}
}

func TestAKeyOfAnotherTypeIsToldInWords(t *testing.T) {
	m := redistest.MiniTCP(t)
	m.HSet("job", "field", "value")
	for line, want := range map[string]string{"inspect job": `leased: inspecting lock "job": `, "unlock --force --yes job": `leased: unlocking lock "job" by force: `} {
		args := strings.Fields(line)
		got := invoke(t, append(args, "--redis", m.Addr())...)
		if got.status != 1 || !strings.HasPrefix(got.err, want) || !strings.Contains(got.err, "another program") || strings.Contains(got.err, "leased: leased:") {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if got := invoke(t, "ls", "--redis", m.Addr()); got.status != 0 || got.out != "" || got.err != "leased: no locks are held or waited for\n" {
		t.Errorf("ls: %+v", got)
	}
}

// Before Redis 7, an error inside a script began with other words.
func TestALockWhoseKeyAnotherProgramTookKeepsNoOtherFromTheList(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	take(t, rdb, "", "job", "mine")
	m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
		refused := strings.HasPrefix(strings.ToLower(cmd), "eval") && slices.Contains(args, "job")
		if refused {
			p.WriteError("ERR Error running script (call to f_1): @user_script:20: @user_script: 20: WRONGTYPE Operation against a key holding the wrong kind of value")
		}
		return refused
	})
	defer m.Server().SetPreHook(nil)
	if got := invoke(t, "ls", "--redis", m.Addr()); got.status != 0 || strings.Contains(got.out, "job") || !strings.Contains(got.out, "mine") {
		t.Errorf("ls: %+v", got)
	}
	top := newTop(rdb, "", "*")
	if err := top.refresh(t.Context(), time.Now()); err != nil || len(top.locks) != 1 {
		t.Errorf("top has %d locks: %v", len(top.locks), err)
	}
}

func TestAnEmptyListSaysSo(t *testing.T) {
	m := redistest.MiniTCP(t)
	for _, c := range []struct{ line, want string }{
		{"ls", "leased: no locks are held or waited for\n"},
		{"ls job:*", "leased: no locks that match \"job:*\" are held or waited for\n"},
		{"ls --all", "leased: no locks are known\n"},
		{"ls --json", ""},
	} {
		got := invoke(t, append(strings.Fields(c.line), "--redis", m.Addr())...)
		if got.status != 0 || got.out != "" || got.err != c.want {
			t.Errorf("%s: %+v", c.line, got)
		}
	}
}

// The rights are those of docs/deployments.md, and what docs/cli.md says beside them.
func TestTheDocumentedRightsAreEnough(t *testing.T) {
	page, err := os.ReadFile("../../docs/deployments.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rule, _ := strings.Cut(string(page), "ACL SETUSER app on >secret ")
	rule, _, _ = strings.Cut(rule, "```")
	in := redistest.Server(t)
	grant := func(rights ...string) {
		t.Helper()
		args := []any{"ACL", "SETUSER", "app", "on", ">secret"}
		for _, right := range append(strings.Fields(rule), rights...) {
			args = append(args, right)
		}
		if err := in.Client().Do(t.Context(), args...).Err(); err != nil {
			t.Skipf("%v; run it on Redis 7 or later, which knows every right of the page", err)
		}
	}
	at := []string{"--redis", "redis://app:secret@" + in.Addr, "--prefix", "app:"}
	grant()
	if got := invoke(t, append([]string{"doctor"}, at...)...); got.status != 0 || !strings.Contains(got.out, "allow +info") {
		t.Errorf("doctor: %+v", got)
	}
	for _, line := range []string{"ls", "top --count 1"} {
		got := invoke(t, append(strings.Fields(line), at...)...)
		if got.status != 1 || !strings.Contains(got.err, "allow +scan") {
			t.Errorf("%s without +scan: %+v", line, got)
		}
	}
	grant("+scan", "+info", "+config|get")
	for _, line := range []string{"ls", "top --count 1", "doctor", "inspect a"} {
		got := invoke(t, append(strings.Fields(line), at...)...)
		if got.status != 0 || strings.Contains(got.out, "allow +") {
			t.Errorf("%s: %+v", line, got)
		}
	}
}

func TestAPartOfAClusterIsNotShownAsAllOfIt(t *testing.T) {
	in := redistest.Server(t, "--cluster-enabled", "yes")
	for _, line := range []string{"ls", "ls --all --json", "top --count 1", "demo", "demo --fence"} {
		got := invoke(t, append(strings.Fields(line), "--redis", "redis://"+in.Addr)...)
		if got.status != 1 || strings.Contains(got.out, "held") || !strings.Contains(got.err, "cannot use Redis at "+in.Addr) || !strings.Contains(got.err, "add --cluster") {
			t.Errorf("leased %s of a node: %+v", line, got)
		}
	}
	// A node that serves all slots knows all locks.
	all := []any{"CLUSTER", "ADDSLOTS"}
	for slot := range 16384 {
		all = append(all, slot)
	}
	if err := in.Client().Do(t.Context(), all...).Err(); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"ls", "top --count 1"} {
		if got := invoke(t, append(strings.Fields(line), "--redis", in.Addr)...); got.status != 0 {
			t.Errorf("leased %s of a Cluster of one node: %+v", line, got)
		}
	}
}

func TestNamesOfLocksAreCompleted(t *testing.T) {
	m := redistest.MiniTCP(t)
	take(t, redistest.MiniClient(t, m), "p:", "job:1", "job:2", "other")
	for _, command := range []string{"run", "inspect", "unlock"} {
		got := invoke(t, "__complete", command, "--redis", m.Addr(), "--prefix", "p:", "job")
		if !strings.Contains(got.out, "job:1\n") || !strings.Contains(got.out, "job:2\n") || strings.Contains(got.out, "other") {
			t.Errorf("%s: %q", command, got.out)
		}
	}
}

// A lock has two keys by which it is found, which different calls of SCAN return.
func TestEachNameIsFoundOnce(t *testing.T) {
	server := redistest.Server(t)
	rdb := server.Client()
	defer rdb.Close()
	const locks = 120
	_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for i := range 20 * locks {
			p.Set(t.Context(), fmt.Sprint("other:", i), "", 0)
		}
		for i := range locks {
			keys, err := protocol.NewKeys("", fmt.Sprint("job:", i))
			if err != nil {
				return err
			}
			p.Set(t.Context(), keys.Meta(), "leased1:1:1", time.Hour)
			p.ZAdd(t.Context(), keys.Queue(), redis.Z{Score: 1, Member: "dead"})
			p.Set(t.Context(), keys.Lock, "of another library", time.Hour)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for _, line := range strings.Fields(invoke(t, "__complete", "inspect", "--redis", server.Addr, "job").out) {
		if strings.HasPrefix(line, "job:") {
			found[line]++
		}
	}
	asked, _ := commandStats(t, rdb, "exists")
	got := invoke(t, "ls", "--redis", server.Addr)
	now, _ := commandStats(t, rdb, "exists")
	for _, name := range names(got.out) {
		found[name]++
	}
	for name, times := range found {
		if times != 2 { // once by each
			t.Errorf("%s was found %d times", name, times)
		}
	}
	if len(found) != locks {
		t.Errorf("found %d locks", len(found))
	}
	if steps := 23 * locks / scanCount; now-asked > locks+2*steps {
		t.Errorf("ls asked %d times whether locks are in use", now-asked)
	}
}

func TestInspectWatchesUntilInterrupted(t *testing.T) {
	m := redistest.MiniTCP(t)
	ctx, cancel := context.WithCancel(t.Context())
	var out, errs shared
	done := make(chan int)
	// Ended by cancel, waited for below.
	go func() {
		done <- run(ctx, streams{strings.NewReader(""), &out, &errs}, []string{"inspect", "--watch", "--json", "--interval", "50ms", "job", "--redis", m.Addr()})
	}()
	eventually(t, "a free lock", func() bool { return strings.Contains(out.String(), `"state":"free"`) })
	m.SetError("LOADING Redis is loading the dataset in memory")
	eventually(t, "an error", func() bool { return strings.Contains(errs.String(), "trying again\n") })
	m.SetError("")
	m.Set("job", "mine")
	eventually(t, "a held lock", func() bool { return strings.Contains(out.String(), `"state":"held"`) })
	if n := strings.Count(errs.String(), "\n"); n != 1 {
		t.Errorf("%d lines about one outage: %s", n, errs.String())
	}
	cancel()
	if status := <-done; status != statusInterrupted {
		t.Errorf("status %d, %s", status, errs.String())
	}
}

func TestTheAddressComesFromTheFlagOrTheEnvironment(t *testing.T) {
	m := redistest.MiniTCP(t)
	m.Set("job", "mine")
	held := func(args ...string) bool {
		t.Helper()
		got := invoke(t, append([]string{"inspect", "job"}, args...)...)
		return got.status == 0 && strings.Contains(got.out, "state   held")
	}
	t.Setenv("LEASED_REDIS", "")
	t.Setenv("REDIS_URL", "redis://"+m.Addr())
	if !held() {
		t.Error("REDIS_URL is not heeded")
	}
	t.Setenv("LEASED_REDIS", m.Addr())
	t.Setenv("REDIS_URL", "redis://127.0.0.1:1")
	if !held() {
		t.Error("LEASED_REDIS does not come before REDIS_URL")
	}
	t.Setenv("LEASED_REDIS", "127.0.0.1:1")
	if !held("--redis", m.Addr()) || held() {
		t.Error("--redis does not come before LEASED_REDIS")
	}
}

func TestDeploymentsAreReached(t *testing.T) {
	if testing.Short() {
		t.Skip("a Cluster, sentinels and TLS take seconds to start; run it without -short")
	}
	reached := func(t *testing.T, args ...string) {
		t.Helper()
		got := invoke(t, append([]string{"doctor"}, args...)...)
		if got.status != 0 || !strings.Contains(got.out, "hand-off") {
			t.Errorf("doctor %v: %+v", args, got)
		}
		if got := invoke(t, append([]string{"inspect", "job"}, args...)...); got.status != 0 {
			t.Errorf("inspect %v: %+v", args, got)
		}
	}
	t.Run("cluster", func(t *testing.T) {
		c := redistest.NewCluster(t)
		rdb := c.NewClient(t)
		take(t, rdb, "", "a", "b", "c", "d", "e")
		addrs := strings.Join(c.ClusterOptions().Addrs, ",")
		reached(t, "--cluster", "--redis", addrs)
		reached(t, "--cluster", "--redis", "redis://"+c.ClusterOptions().Addrs[0])
		if got := invoke(t, "ls", "--cluster", "--redis", addrs); strings.Join(names(got.out), " ") != "a b c d e" {
			t.Errorf("ls of a Cluster: %+v", got)
		}
		// A node by itself owns some of the slots only.
		told := false
		for i := range 20 {
			got := invoke(t, "inspect", fmt.Sprint("lock", i), "--redis", c.ClusterOptions().Addrs[0])
			told = told || strings.Contains(got.err, "add --cluster")
		}
		if !told {
			t.Error("that --cluster is missing is not told")
		}
		// The owner listens to one of the masters, which may not be the one that has the lock.
		take(t, rdb, "billing:", "x", "y", "z")
		for _, name := range []string{"billing:x", "billing:y", "billing:z"} {
			eventually(t, "the owner is found by its channel", func() bool {
				return strings.Contains(invoke(t, "inspect", name, "--cluster", "--redis", addrs).out, "hint ")
			})
			got := invoke(t, "unlock", "--force", "--yes", name, "--cluster", "--redis", addrs)
			if got.status != statusUsage || !strings.Contains(got.err, "--prefix billing: ") {
				t.Errorf("unlock under another prefix: %+v", got)
			}
		}
		// A move that was interrupted leaves the slot open.
		elsewhere := c.Owner("b")
		for _, name := range []string{"c", "d", "e"} {
			if elsewhere == c.Owner("a") {
				elsewhere = c.Owner(name)
			}
		}
		move := c.BeginMove("a", elsewhere)
		if got := invoke(t, "ls", "--cluster", "--redis", addrs, "--prefix", "", "[a-e]"); got.status != 1 || strings.Join(names(got.out), " ") != "b c d e" ||
			!strings.Contains(got.err, "1 lock cannot be read while the Cluster moves the slot") || !strings.HasSuffix(got.err, ": a\n") {
			t.Errorf("ls: %+v", got)
		}
		if got := invoke(t, "top", "--count", "1", "--cluster", "--redis", addrs); got.status != 0 || !strings.Contains(got.out, "; 1 lock cannot be read") || !regexp.MustCompile(`(?m)^a +slot moves +- +0 +- +- +-$`).MatchString(got.out) || !strings.Contains(got.out, "b ") {
			t.Errorf("top: %+v", got)
		}
		if got := invoke(t, "inspect", "a", "--cluster", "--redis", addrs); got.status != 1 || !strings.Contains(got.err, "is moving the slot of the lock: try again") {
			t.Errorf("inspect: %+v", got)
		}
		move.End()
		for _, node := range c.Nodes { // replicas are last
			got := invoke(t, "ls", "--redis", node.Addr)
			if got.status != 1 || got.out != "" || !strings.Contains(got.err, "add --cluster") {
				t.Errorf("ls of one node: %+v", got)
			}
		}
	})
	t.Run("tls", func(t *testing.T) {
		in := redistest.TLSServer(t)
		ca, err := in.Client().ConfigGet(t.Context(), "tls-ca-cert-file").Result()
		if err != nil {
			t.Fatal(err)
		}
		own := in.Options().TLSConfig.Certificates[0]
		key, err := x509.MarshalPKCS8PrivateKey(own.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		certFile, keyFile := filepath.Join(dir, "client.crt"), filepath.Join(dir, "client.key")
		for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: own.Certificate[0]}, keyFile: {Type: "PRIVATE KEY", Bytes: key}} {
			if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		files := []string{"--cacert", ca["tls-ca-cert-file"], "--cert", certFile, "--key", keyFile}
		reached(t, append(files, "--tls", "--redis", in.Addr)...)
		reached(t, append(files, "--redis", "rediss://"+in.Addr)...)
		if got := invoke(t, "inspect", "a", "--redis", "rediss://"+in.Addr); got.status != 1 || !strings.Contains(got.err, "certificate") {
			t.Errorf("without the authority's certificate: %+v", got)
		}
	})
	t.Run("sentinel", func(t *testing.T) {
		o := redistest.NewSentinels(t).FailoverOptions()
		reached(t, "--sentinel", o.MasterName, "--redis", strings.Join(o.SentinelAddrs, ","))
		reached(t, "--redis", "redis://"+o.SentinelAddrs[0]+"?master_name="+o.MasterName)
	})
}

func TestTLSOnOneSideOnlyAndAProxyWithoutAServerAreTold(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("there is no leased run on Windows; run it on another system")
	}
	plain := redistest.Server(t)
	if got := invoke(t, "inspect", "a", "--redis", redistest.TLSServer(t).Addr); got.status != 1 || !strings.Contains(got.err, "add --tls") {
		t.Errorf("without TLS: %+v", got)
	}
	began := time.Now()
	got := invoke(t, "run", "--redis", "rediss://"+plain.Addr, "-w", "0.1", "a", "--", "true")
	if got.status != statusRunUnavailable || !strings.Contains(got.err, "leave out --tls") {
		t.Errorf("with TLS: %+v", got)
	}
	if took := time.Since(began); took > 4*time.Second { // without -w it is 5 s
		t.Errorf("to connect took %v in spite of -w", took)
	}
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepting := make(chan struct{})
	go func() {
		defer close(accepting)
		for {
			conn, err := proxy.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	got = invoke(t, "run", "--redis", proxy.Addr().String(), "a", "--", "true")
	if got.status != statusRunUnavailable || !strings.Contains(got.err, "add --tls") || !strings.Contains(got.err, "if it is a proxy, it may have no server") {
		t.Errorf("with a proxy that has no server: %+v", got)
	}
	proxy.Close()
	<-accepting
	plain.Client().ConfigSet(t.Context(), "requirepass", "hush")
	if got := invoke(t, "inspect", "a", "--redis", plain.Addr); !strings.Contains(got.err, "cannot use Redis at "+plain.Addr+": it requires a password") {
		t.Errorf("without the password: %+v", got)
	}
}

func TestDoctorSaysWhatIsBadForLocks(t *testing.T) {
	in := redistest.Server(t, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
	got := invoke(t, "doctor", "--redis", in.Addr)
	if got.status != 1 || !strings.Contains(got.out, "bad   eviction") || !strings.Contains(got.out, "noeviction") || got.err != "" {
		t.Errorf("of a server that evicts: %+v", got)
	}
	rdb := in.Client()
	if keys, err := redistest.Keys(t.Context(), rdb, ""); err != nil || len(keys) > 0 {
		t.Errorf("doctor left %q, %v", keys, err)
	}
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "few", "on", ">pass", "~*", "resetchannels", "+@all", "-info", "-subscribe").Err(); err != nil {
		t.Fatal(err)
	}
	got = invoke(t, "doctor", "--redis", "redis://few:pass@"+in.Addr)
	if got.status != 1 || !strings.Contains(got.out, "bad   hand-off") || !strings.Contains(got.out, "leased:inbox:*") || !strings.Contains(got.out, "allow +info") {
		t.Errorf("of a user with few rights: %+v", got)
	}
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "none", "on", ">pass", "~x:*", "+@all").Err(); err != nil {
		t.Fatal(err)
	}
	got = invoke(t, "doctor", "--redis", "redis://none:pass@"+in.Addr)
	if got.status != 1 || !strings.Contains(got.out, "bad   lock") || !strings.Contains(got.out, "Least rights") {
		t.Errorf("of a user without keys: %+v", got)
	}
	got = invoke(t, "inspect", "a", "--redis", "redis://few:wrong@"+in.Addr)
	if got.status != 1 || !strings.Contains(got.err, "does not take this user or password") || strings.Contains(got.err, "wrong@") {
		t.Errorf("with a wrong password: %+v", got)
	}
}

// With what is good enough for a single server, a server of a quorum comes back with a part of its locks, and votes.
func TestDoctorKnowsWhatAServerOfAQuorumNeeds(t *testing.T) {
	in := redistest.Server(t)
	rdb := in.Client()
	rdb.Set(t.Context(), protocol.MarkKey("app:"), "1", 0)
	with := func(settings ...string) {
		t.Helper()
		for i := 0; i < len(settings); i += 2 {
			if err := rdb.ConfigSet(t.Context(), settings[i], settings[i+1]).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	says := func(status int, wants ...string) {
		t.Helper()
		got := invoke(t, "doctor", "--redis", in.Addr, "--prefix", "app:")
		for _, want := range wants {
			if got.status != status || !strings.Contains(strings.Join(strings.Fields(got.out), " "), want) {
				t.Errorf("want status %d and %q: %+v", status, want, got)
			}
		}
	}
	with("save", "")
	says(0, "ok persistence none After a restart, this server of a quorum does not vote until its quarantine is over, unless Redis finds an old dump.rdb", "ok replication no replicas")
	with("save", "3600 1")
	says(1, "bad persistence only snapshots, save 3600 1", `"app:leased:quorum:mark"`, "then two processes can own one lock")
	with("appendonly", "yes", "appendfsync", "everysec")
	says(1, "bad persistence append-only file, appendfsync everysec")
	with("appendfsync", "always", "no-appendfsync-on-rewrite", "yes")
	says(1, "bad persistence append-only file, appendfsync always, no-appendfsync-on-rewrite yes")
	with("no-appendfsync-on-rewrite", "no")
	says(0, "ok persistence append-only file, appendfsync always")
	if got := invoke(t, "doctor", "--redis", in.Addr); got.status != 0 || strings.Contains(got.out, "quorum") {
		t.Errorf("without the prefix: %+v", got)
	}
}

// A snapshot that fails stops all locks, which is too late to find out when it has failed.
func TestDoctorNotesThatASnapshotThatFailsWouldStopAllLocks(t *testing.T) {
	in := redistest.Server(t)
	rdb := in.Client()
	rdb.ConfigSet(t.Context(), "save", "3600 1")
	says := func(want string) {
		t.Helper()
		if got := invoke(t, "doctor", "--redis", in.Addr); got.status != 0 || !strings.Contains(got.out, want) {
			t.Errorf("want %q: %+v", want, got)
		}
	}
	says("note  snapshots    save 3600 1, with stop-writes-on-bgsave-error yes")
	rdb.ConfigSet(t.Context(), "stop-writes-on-bgsave-error", "no")
	says("ok    snapshots    save 3600 1; one that fails stops no locks")
	rdb.ConfigSet(t.Context(), "stop-writes-on-bgsave-error", "yes")
	rdb.ConfigSet(t.Context(), "save", "")
	says("ok    snapshots    none")
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "few", "on", ">pass", "~*", "&*", "+@all", "-config").Err(); err != nil {
		t.Fatal(err)
	}
	got := invoke(t, "doctor", "--redis", "redis://few:pass@"+in.Addr)
	if got.status != 0 || !strings.Contains(got.out, "?     snapshots") || !strings.Contains(got.out, "allow +config|get") {
		t.Errorf("of a user who may not read the configuration: %+v", got)
	}
}

// full returns a server without memory for another key.
func full(t *testing.T) *redistest.Instance {
	t.Helper()
	in := redistest.Server(t)
	if err := in.Client().ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	return in
}

// The advice is for the cause, and comes without a long wait.
func TestDoctorSaysWhatToChangeAboutAServerThatGivesNoLocks(t *testing.T) {
	began := time.Now()
	for _, c := range []struct{ name, addr, bad, change string }{
		{"replica", redistest.NewReplication(t, 1).Replicas()[0].Addr, "bad   role", "connect to the primary"},
		{"no memory", full(t).Addr, "bad   lock", "raise maxmemory"},
		{"node of a Cluster", redistest.Server(t, "--cluster-enabled", "yes").Addr, "bad   role", "add --cluster"},
	} {
		got := invoke(t, "doctor", "--redis", c.addr)
		if got.status != 1 || !strings.Contains(got.out, c.bad) || !strings.Contains(got.out, "-> "+c.change) || strings.Contains(got.out, "Least rights") ||
			strings.Contains(c.bad, "role") != strings.Contains(got.out, "?     lock         not tried") {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
	if took := time.Since(began); took > 14*time.Second { // doctor's own bound is 15 s, for each
		t.Errorf("it took %v", took)
	}
}

// A server's clock says nothing about leases until another server, with another clock, has the lock.
func TestDoctorNotesClocksThatDiffer(t *testing.T) {
	m := redistest.MiniTCP(t)
	if f, lead := clockFinding(t.Context(), redistest.MiniClient(t, m)); f.verdict != verdictOK || !lead.known || lead.least > time.Second {
		t.Errorf("of a good clock: %+v, %+v", f, lead)
	}
	m.SetTime(time.Now().Add(time.Hour))
	f, lead := clockFinding(t.Context(), redistest.MiniClient(t, m))
	if f.verdict != verdictNote || !strings.Contains(f.means, "two processes can own one lock") || !strings.Contains(f.means, "restarts empty, tokens go back") || lead.least < time.Hour-time.Minute {
		t.Errorf("of a clock that is an hour ahead: %+v, %+v", f, lead)
	}

	if f := persistenceFinding(map[string]string{"aof_enabled": "0"}); !strings.Contains(f.means, "unless the clock is set back") {
		t.Errorf("of a restart without data: %+v", f)
	}

	lead = clockLead{-5 * time.Millisecond, 5 * time.Millisecond, true}
	for _, c := range []struct {
		second  clockLead
		verdict verdict
		found   string
	}{
		{clockLead{295 * time.Millisecond, time.Second, true}, verdictOK, "agree"},
		{clockLead{2005 * time.Millisecond, 3 * time.Second, true}, verdictNote, "master 2 is 2.0s ahead of that of master 1"},
		{clockLead{-3 * time.Second, -2005 * time.Millisecond, true}, verdictNote, "master 1 is 2.0s ahead of that of master 2"},
		{clockLead{}, verdictUnknown, "not all of them tell the time"},
	} {
		if f := clocksFinding([]clockLead{lead, c.second, lead}); f.verdict != c.verdict || !strings.Contains(f.found, c.found) {
			t.Errorf("beside %+v: %+v", c.second, f)
		}
	}
}

// A lease that no renewal reached in time says more of the way to the server than of the server.
func TestDoctorSaysWhyALeaseOfItsTestWasLost(t *testing.T) {
	for reason, want := range map[string]string{
		"it could not be renewed in time":            "See the round trip",
		"another client took it, or deleted its key": "the server drops keys",
	} {
		if got := meaningOfLoss(fmt.Errorf("%w: %s", leased.ErrLeaseLost, reason)); !strings.Contains(got, want) {
			t.Errorf("%s: %q", reason, got)
		}
	}
	if got := meaningOfLoss(leased.ErrNotReleased); got != "" {
		t.Errorf("no loss: %q", got)
	}
}

func TestDoctorNamesTheServerAndItsRole(t *testing.T) {
	for _, c := range []struct {
		info    map[string]string
		version verdict
		named   string
		role    verdict
	}{
		{map[string]string{"redis_version": "8.6.3", "role": "master"}, "ok", "Redis 8.6.3", "ok"},
		{map[string]string{"redis_version": "7.2.4", "valkey_version": "9.1.2", "role": "slave"}, "ok", "Valkey 9.1.2", "bad"},
		{map[string]string{"redis_version": "7.2.4", "redict_version": "7.3.6", "role": "master"}, "ok", "Redict 7.3.6", "ok"},
		{map[string]string{"redis_version": "6.3.4", "server_threads": "2", "role": "active-replica"}, "note", "KeyDB 6.3.4", "bad"},
		{map[string]string{"redis_version": "7.4.0", "dragonfly_version": "df-v1.30.0", "role": "master"}, "?", "Dragonfly df-v1.30.0", "ok"},
		{map[string]string{"redis_version": "7.0.0", "kvrocks_version": "2.12.0", "role": "master"}, "?", "Kvrocks 2.12.0", "ok"},
		{map[string]string{"redis_version": "7.4.3", "garnet_version": "1.0.80", "role": "master"}, "bad", "Garnet 1.0.80", "ok"},
		{map[string]string{"redis_version": "4.0.14", "role": "master"}, "bad", "Redis 4.0.14", "ok"},
		{map[string]string{"role": "master"}, "?", "Redis", "ok"},
		{map[string]string{"redis_version": "8.6.3", "role": "master", "redis_mode": "cluster"}, "ok", "Redis 8.6.3", "bad"},
		{map[string]string{"redis_version": "7.2.4", "valkey_version": "9.1.2", "role": "master", "server_mode": "cluster"}, "ok", "Valkey 9.1.2", "bad"},
	} {
		version, role := versionFinding(c.info), roleFinding(c.info, false)
		if version.verdict != c.version || strings.TrimSpace(version.found) != c.named || role.verdict != c.role {
			t.Errorf("%v: %+v, %+v", c.info, version, role)
		}
		for _, f := range []finding{version, role} {
			if f.verdict != verdictOK && (f.means == "" || f.change == "") {
				t.Errorf("%v: %+v does not say what it means and what to change", c.info, f)
			}
		}
	}
}

func TestBenchMeasuresAndLeavesNothing(t *testing.T) {
	in := redistest.Server(t)
	got := invoke(t, "bench", "--for", "20ms", "--redis", in.Addr)
	if got.status != 0 || strings.Count(got.out, "\n") != 6 || !strings.Contains(got.out, "lock and unlock, uncontended") {
		t.Errorf("%+v", got)
	}
	eventually(t, "nothing is left", func() bool {
		keys, err := redistest.Keys(t.Context(), in.Client(), "")
		return err == nil && len(keys) == 0
	})
}

// What is watched may be a failover. Whoever asks for a number of pictures does not wait for its end.
func TestTopGoesOnAfterAnErrorUnlessItCounts(t *testing.T) {
	for _, counts := range []bool{false, true} {
		m := redistest.MiniTCP(t)
		take(t, redistest.MiniClient(t, m), "", "job")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		args := []string{"top", "--interval", "50ms", "--redis", m.Addr()}
		if counts {
			args = append(args, "--count", "1000000")
		}
		var out, errs shared
		done := make(chan int)
		// Ended by cancel, or by the error; waited for below.
		go func() { done <- run(ctx, streams{strings.NewReader(""), &out, &errs}, args) }()
		eventually(t, "a picture", func() bool { return strings.Contains(out.String(), "job") })
		m.SetError("LOADING Redis is loading the dataset in memory")
		if !counts {
			eventually(t, "an error", func() bool { return strings.Contains(errs.String(), "trying again\n") })
			m.SetError("")
			seen := len(out.String())
			eventually(t, "another picture", func() bool { return strings.Contains(out.String()[seen:], "job") })
			cancel()
		}
		if status := <-done; counts != (status == statusFailed) {
			t.Errorf("counts %v: status %d, %s", counts, status, errs.String())
		}
	}
}

func TestWhatIsWatchedEndsWithCtrlC(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no way to send Ctrl-C to one process; run it on another system")
	}
	m := redistest.MiniTCP(t)
	take(t, redistest.MiniClient(t, m), "", "job")
	for _, line := range []string{"top --interval 50ms", "inspect --watch --interval 50ms job"} {
		cmd := program(t, append(strings.Fields(line), "--redis", m.Addr())...)
		var out, errs shared
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() })
		eventually(t, "a picture", func() bool { return strings.Contains(out.String(), "job") })
		cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil || errs.String() != "" {
			t.Errorf("leased %s: %v, stderr %q", line, err, errs.String())
		}
	}
}
