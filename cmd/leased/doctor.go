package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
)

func doctorCommand(std streams) *cobra.Command {
	var at address
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether a Redis is fit for locks",
		Long: "Checks whether a Redis is fit for locks, says what each finding means for them, and what to change. It takes a lock of its own " +
			"under the prefix and hands it from one client to another. The exit status is 1 if anything is bad.",
		Args: noArguments,
		RunE: interruptible(func(ctx context.Context, _ []string) error { return examine(ctx, std, &at) }),
	}
	at.bindOne(c)
	return c
}

// verdict is what a check makes of a server.
type verdict string

const (
	verdictOK      verdict = "ok"
	verdictNote    verdict = "note"
	verdictBad     verdict = "bad"
	verdictUnknown verdict = "?" // Redis would not say, or nobody knows
)

// finding is the result of one check.
type finding struct {
	verdict verdict
	what    string
	found   string
	means   string // for locks
	change  string // what to do about it
}

func examine(ctx context.Context, std streams, at *address) error {
	rdb, err := at.connect(ctx, func(o *redis.UniversalOptions) { o.PoolSize, o.MaxIdleConns = 2*probes, 1 })
	if err != nil {
		return err
	}
	defer rdb.Close()
	d := diagnosis{out: std.out, screen: newScreen(std.out)}
	wrongServer := false
	_, isCluster := rdb.(*redis.ClusterClient)
	nodes, err := masters(ctx, rdb)
	if err != nil {
		return at.explain(err)
	}
	clocks := make([]clockLead, len(nodes))
	for i, node := range nodes {
		if i > 0 {
			fmt.Fprintln(std.out)
		}
		if len(nodes) > 1 {
			fmt.Fprintf(std.out, "master %d of %d: %v\n", i+1, len(nodes), node)
		}
		ofQuorum := !isCluster && isOfQuorum(ctx, node, at.prefix)
		info, err := infoInTime(ctx, node)
		if err != nil {
			d.tell(infoFinding(err))
		} else {
			d.tell(versionFinding(info))
			role := roleFinding(info, isCluster)
			d.tell(role)
			wrongServer = wrongServer || role.verdict == verdictBad
			if node, ok := node.(*redis.Client); ok {
				servers := serversFinding(whereConnectionsLead(ctx, node, spareConnections(info)))
				d.tell(servers)
				wrongServer = wrongServer || servers.verdict == verdictBad
			}
			d.tell(evictionFinding(info))
			if ofQuorum {
				d.tell(quorumReplicationFinding(info))
			} else {
				d.tell(persistenceFinding(info))
				d.tell(replicationFinding(info))
			}
			if commands, ok := commandsFinding(ctx, node); ok {
				d.tell(commands)
			}
		}
		if ofQuorum {
			d.tell(quorumPersistenceFinding(ctx, node, at.prefix))
		}
		d.tell(snapshotFinding(ctx, node))
		var clock finding
		clock, clocks[i] = clockFinding(ctx, node)
		d.tell(clock)
	}
	if len(nodes) > 1 {
		fmt.Fprintln(std.out)
		d.tell(clocksFinding(clocks))
	}
	if o, err := at.options(); err == nil && o.MasterName != "" {
		d.tell(replicasFinding(ctx, o))
	}
	d.tell(roundTripFinding(ctx, rdb))
	if wrongServer {
		d.tell(finding{verdictUnknown, "lock", "not tried", "Whatever a lock does there, it would say nothing of locks elsewhere.", ""})
	} else {
		for _, f := range lockFindings(ctx, rdb, at) {
			d.tell(f)
		}
	}
	if ctx.Err() != nil {
		return errInterrupted
	}
	if d.bad > 0 {
		return errReported
	}
	return nil
}

// diagnosis prints findings, and counts the bad ones.
type diagnosis struct {
	out    io.Writer
	screen *screen
	bad    int
}

func (d *diagnosis) tell(f finding) {
	if f.verdict == verdictBad {
		d.bad++
	}
	paint := map[verdict]func(string) string{verdictOK: d.screen.good, verdictBad: d.screen.bad}[f.verdict]
	if paint == nil {
		paint = d.screen.bold
	}
	width := proseWidth(d.out)
	label := fmt.Sprintf("%-5s %-12s ", f.verdict, f.what)
	lines := wrap(f.found, max(width-len(label), 20))
	fmt.Fprintf(d.out, "%s%s%s\n", paint(string(f.verdict)), label[len(f.verdict):], lines[0])
	for _, line := range lines[1:] {
		fmt.Fprintf(d.out, "%19s%s\n", "", line)
	}
	indent := strings.Repeat(" ", min(len(label), width/4))
	if f.means != "" {
		hang(d.out, indent, f.means, width)
	}
	if f.change != "" {
		hang(d.out, indent+"-> ", f.change, width)
	}
}

// serverInfo returns the fields of INFO.
func serverInfo(ctx context.Context, node redis.Cmdable) (map[string]string, error) {
	text, err := node.Info(ctx).Result()
	if err != nil {
		return nil, err
	}
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields, nil
}

// infoInTime is serverInfo that does not wait for all that the client would try.
func infoInTime(ctx context.Context, node redis.Cmdable) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	return serverInfo(ctx, node)
}

// infoFinding says why there is no INFO. It is the longest answer that is asked for, so it may be the only one
// that is lost on the way.
func infoFinding(err error) finding {
	f := finding{verdictUnknown, "INFO", "this user may not read it: " + err.Error(),
		"Version, role, eviction, persistence, replication, and whether all connections lead to one server, are not checked.", "allow +info, for this check only"}
	if unanswered(err) {
		f.found = "its answer did not arrive: " + err.Error()
		f.change = "if shorter answers arrive, large packets may be lost on the way: look for a part of it with a smaller MTU"
	}
	return f
}

// forks are the servers that call themselves Redis in redis_version too, by a field of INFO that
// Redis does not have.
var forks = []struct {
	field    string
	name     string
	untested bool // the tests were never run on it
}{
	{"valkey_version", "Valkey", false},
	{"redict_version", "Redict", false},
	{"dragonfly_version", "Dragonfly", true},
	{"kvrocks_version", "Kvrocks", true},
	{"garnet_version", "Garnet", true}, // see versionFinding
}

func versionFinding(info map[string]string) finding {
	name, version, untested := "Redis", info["redis_version"], false
	keyDB := info["server_threads"] != "" // it gives its own version as that of Redis
	if keyDB {
		name = "KeyDB"
	}
	for _, other := range forks {
		if v := info[other.field]; v != "" {
			name, version, untested = other.name, v, other.untested
		}
	}
	f := finding{verdictOK, "version", name + " " + version, "", ""}
	major, _, _ := strings.Cut(info["redis_version"], ".")
	switch n, err := strconv.Atoi(major); {
	case info["garnet_version"] != "":
		f.verdict, f.means = verdictBad, "It does not run a script in one step by default: then two processes own one lock."
		f.change = "use Redis, or Valkey; for what is wrong where it does, see the table in docs/deployments.md"
	case untested || err != nil:
		f.verdict, f.means = verdictUnknown, "The tests of this program were never run on it."
		f.change = "see the table in docs/deployments.md; do not rely on a lock that was not tried there"
	case keyDB:
		f.verdict, f.means = verdictNote, "It does not apply min-replicas-to-write to scripts, so a primary that has lost its replicas goes on giving locks."
		f.change = "leased.WithReplicas makes a lock wait for replicas"
	case n < 5:
		f.verdict, f.means, f.change = verdictBad, "Its scripts may not read the clock and then write, as those of locks do.", "use Redis 6.2 or later, or Valkey"
	}
	return f
}

func roleFinding(info map[string]string, isCluster bool) finding {
	switch info["role"] {
	case "slave":
		return finding{verdictBad, "role", "a replica", "It admits no writes, so no lock.", "connect to the primary, or by --sentinel NAME; if you did, " + sentinelsBehind}
	case "active-replica":
		return finding{verdictBad, "role", "one of several masters (KeyDB's active replication)", "Each of them gives locks without asking the others: " +
			"then two processes own one.", "set active-replica no"}
	}
	mode := cmp.Or(info["redis_mode"], info["server_mode"], "standalone") // the second is Valkey's
	if mode == "cluster" && !isCluster {
		return finding{verdictBad, "role", "one node of a Cluster", "It refuses the locks whose slots other nodes serve.", "add --cluster"}
	}
	return finding{verdictOK, "role", "a primary, " + mode, "", ""}
}

func evictionFinding(info map[string]string) finding {
	policy, limit := info["maxmemory_policy"], info["maxmemory"]
	switch {
	case policy == "":
		return finding{verdictUnknown, "eviction", "the server does not tell", "A server that evicts keys evicts locks.", ""}
	case policy == "noeviction":
		return finding{verdictOK, "eviction", policy, "", ""}
	case limit == "0" || limit == "":
		return finding{verdictNote, "eviction", policy + ", but maxmemory is not set", "Once it is, locks are evicted: then two processes own one.", "set maxmemory-policy noeviction"}
	}
	return finding{verdictBad, "eviction", policy, "When memory is full, keys of locks are evicted as any others: then two processes own one lock.",
		"set maxmemory-policy noeviction, or give locks a server of their own"}
}

func persistenceFinding(info map[string]string) finding {
	if info["aof_enabled"] == "1" {
		return finding{verdictOK, "persistence", "append-only file", "A crash loses at most what was not yet written to disk (appendfsync).", ""}
	}
	return finding{verdictNote, "persistence", "no append-only file", "A restart loses the locks taken since the last snapshot, or all: others get them while the " +
		"old owners, who learn of it at their next renewal, still work. Tokens go on growing, unless the clock is set back " +
		"before: then fenced data refuse every lease until it has caught up (docs/fencing.md).", "set appendonly yes, or have resources compare tokens"}
}

// settingsOf returns settings of the server, or reports false and completes unknown if it does not tell them all.
func settingsOf(ctx context.Context, node redis.Cmdable, unknown *finding, names ...string) (values map[string]string, ok bool) {
	values = map[string]string{}
	for _, name := range names { // before Redis 7, one at a time
		found, err := node.ConfigGet(ctx, name).Result()
		if err != nil {
			unknown.found = "CONFIG GET failed: " + err.Error()
			if strings.Contains(err.Error(), "NOPERM") { // services without CONFIG have no such right
				unknown.change = "allow +config|get, for this check only"
			}
			return nil, false
		}
		if values[name], ok = found[name]; !ok {
			unknown.found = "the server does not tell"
			return nil, false
		}
	}
	return values, true
}

// snapshotFinding says whether a snapshot that fails would stop all locks.
func snapshotFinding(ctx context.Context, node redis.Cmdable) finding {
	unknown := finding{verdictUnknown, "snapshots", "", "Whether a snapshot that fails would stop all locks is not checked.", ""}
	settings, ok := settingsOf(ctx, node, &unknown, "save", "stop-writes-on-bgsave-error")
	if !ok {
		return unknown
	}
	switch save, stops := settings["save"], settings["stop-writes-on-bgsave-error"]; {
	case save == "":
		return finding{verdictOK, "snapshots", "none", "", ""}
	case stops != "yes":
		return finding{verdictOK, "snapshots", "save " + save + "; one that fails stops no locks", "", ""}
	default:
		return finding{verdictNote, "snapshots", "save " + save + ", with stop-writes-on-bgsave-error yes", "If one fails, as on a full disk, Redis refuses all writes: locks are neither taken, renewed nor " +
			"released until one succeeds, and all leases are lost within a TTL.", "set stop-writes-on-bgsave-error no or, if there is nothing but locks, save \"\""}
	}
}

func replicationFinding(info map[string]string) finding {
	n, _ := strconv.Atoi(info["connected_slaves"])
	if n == 0 {
		return finding{verdictNote, "replication", "no replicas", "If this server is lost, locks wait until it is back.", ""}
	}
	f := finding{verdictOK, "replication", count(n, "replica", "replicas"), "Replication is asynchronous: a failover can lose the newest locks, and then two processes " +
		"own one until the next renewal.", "have resources compare tokens; leased.WithReplicas makes a lock wait for replicas"}
	for i := range n {
		if state := info["slave"+strconv.Itoa(i)]; !strings.Contains(state, "state=online") {
			f.verdict, f.found = verdictNote, f.found+", not all of them online"
			break
		}
	}
	return f
}

// clockLead is how far a server's clock is ahead of this machine's: from least to most, because nobody
// knows when on its way the server read it.
type clockLead struct {
	least, most time.Duration
	known       bool
}

// clockMargin is by how much servers' clocks may differ: 1 % of the default TTL.
const clockMargin = protocol.DefaultTTL / 100

func clockFinding(ctx context.Context, node redis.Cmdable) (finding, clockLead) {
	before := time.Now()
	there, err := node.Time(ctx).Result()
	took := time.Since(before)
	if err != nil {
		if unanswered(err) {
			return finding{verdictBad, "clock", "TIME has no answer: " + err.Error(), "", ""}, clockLead{}
		}
		return finding{verdictBad, "clock", "TIME is refused: " + err.Error(), "The scripts of locks call it.", "allow +time"}, clockLead{}
	}
	ahead := there.Sub(before.Add(took / 2))
	f := finding{verdictOK, "clock", fmt.Sprintf("%s, %s this machine's", instant(there), aheadText(ahead, took)), "", ""}
	if ahead.Abs() > time.Second+took {
		f.verdict = verdictNote
		f.means = "Leases last as long as they should until a failover or, for readers in a Cluster, until a slot moves. If the clock of the server that then " +
			"has the lock is ahead of the other one's by more than 1 % of the TTL, leases end early, and two processes can own one lock. If it is behind, or " +
			"was set back before this server restarts empty, tokens go back, and fenced data refuse every lease until it has caught up (docs/fencing.md)."
		f.change = keepClocks
	}
	return f, clockLead{ahead - took/2, ahead + took/2, true}
}

const keepClocks = "synchronize the clocks of all servers with NTP"

// clocksFinding compares the clocks of the masters of a Cluster.
func clocksFinding(leads []clockLead) finding {
	first, last := -1, -1 // the masters whose clocks are surely the least and the most ahead
	for i, l := range leads {
		if !l.known {
			return finding{verdictUnknown, "clocks", "not compared, because not all of them tell the time", "", ""}
		}
		if first < 0 || l.most < leads[first].most {
			first = i
		}
		if last < 0 || l.least > leads[last].least {
			last = i
		}
	}
	apart := leads[last].least - leads[first].most
	if apart <= clockMargin {
		return finding{verdictOK, "clocks", "those of all masters agree", "", ""}
	}
	return finding{verdictNote, "clocks", fmt.Sprintf("that of master %d is %s ahead of that of master %d", last+1, brief(apart), first+1),
		"If a slot moves to it, leases of readers with a TTL of less than " + brief(100*apart) + " end early, and two processes can own one lock.", keepClocks}
}

func aheadText(ahead, took time.Duration) string {
	switch {
	case ahead.Abs() <= max(took, 10*time.Millisecond):
		return "the same as"
	case ahead > 0:
		return brief(ahead) + " ahead of"
	}
	return brief(-ahead) + " behind"
}

func roundTripFinding(ctx context.Context, rdb redis.UniversalClient) finding {
	var trips []time.Duration
	for range 20 {
		start := time.Now()
		if err := rdb.Ping(ctx).Err(); err != nil {
			return finding{verdictBad, "round trip", err.Error(), "", ""}
		}
		trips = append(trips, time.Since(start))
	}
	return tripsFinding(trips)
}

func tripsFinding(trips []time.Duration) finding {
	p50, most := quantile(trips, 0.5), slices.Max(trips)
	f := finding{verdictOK, "round trip", fmt.Sprintf("%s, at most %s of %d", milliseconds(p50), milliseconds(most), len(trips)), "", ""}
	if most > 100*time.Millisecond {
		f.verdict, f.means = verdictNote, "Each lock and unlock that needs Redis takes as long."
		f.change = "unless Redis is that far away, find out what makes it slow: SLOWLOG GET, LATENCY LATEST; until then, choose a TTL of at least " + brief(max(30*most, time.Second))
	}
	return f
}

// lockFindings takes a lock and hands it from one client to another, which uses most of the
// permissions that locks need.
func lockFindings(ctx context.Context, rdb redis.UniversalClient, at *address) []finding {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	refused := func(what string, err error) []finding {
		return []finding{{verdictBad, what, bare(err), "", hintFor(err).advice}}
	}
	name := "leased-doctor:" + randomName()
	var clients [2]*leased.Client
	for i := range clients {
		c, err := newClient(rdb, at.prefix, leased.WithTTL(5*time.Second), leased.WithOwner("leased-doctor"))
		if err != nil {
			return refused("prefix", err)
		}
		defer c.Close()
		clients[i] = c
	}
	defer func() { _ = deleteKeys(ctx, rdb, lockKeys(at.prefix, name)) }() // if this fails, they expire

	start := time.Now()
	lease, err := clients[0].Mutex(name).TryLockContext(ctx) // nobody else has it, and a refusal is returned at once
	if err != nil {
		return refused("lock", err)
	}
	took := time.Since(start)
	if err := lease.Check(ctx); err != nil {
		return append(refused("renewal", err), unlockFinding(lease)...)
	}
	findings := []finding{{verdictOK, "lock", "taken in " + milliseconds(took) + ", renewed", "", ""}}
	got := make(chan error, 1)
	var second *leased.Lease
	// This is ended by ctx or by the lock, and waited for below.
	go func() {
		var err error
		second, err = clients[1].Mutex(name).LockContext(ctx)
		got <- err
	}()
	// There is nothing to hand over until the other client is in the queue.
	for ctx.Err() == nil {
		info, err := clients[0].Inspect(ctx, name)
		if err != nil || info.Queue > 0 {
			break
		}
		pause(ctx, 5*time.Millisecond)
	}
	start = time.Now()
	findings = append(findings, unlockFinding(lease)...)
	if err := <-got; err != nil {
		return append(findings, refused("hand-off", err)...)
	}
	took = time.Since(start)
	if clients[1].Stats().Direct > 0 {
		findings = append(findings, finding{verdictOK, "hand-off", "by message, in " + milliseconds(took), "", ""})
	} else {
		findings = append(findings, finding{verdictBad, "hand-off", "without a message, in " + milliseconds(took),
			"Messages do not arrive, so those who wait poll, and are not served in order.",
			"allow SUBSCRIBE and PUBLISH and the channels " + protocol.InboxChannel(at.prefix, "*") + "; do without a proxy that sends them to another server"})
	}
	findings = append(findings, unlockFinding(second)...)
	if err := rdb.PubSubNumSub(ctx, protocol.InboxChannel(at.prefix, "nobody")).Err(); err != nil && ctx.Err() == nil {
		findings = append(findings, finding{verdictNote, "PUBSUB", err.Error(), "A waiter that died costs the next one up to its TTL.", "allow +pubsub|numsub (Redis 6.2: +pubsub)"})
	}
	return findings
}

// meaningOfLoss says what the error of an Unlock says of a server on which nobody else has the lock.
func meaningOfLoss(err error) string {
	switch {
	case !errors.Is(err, leased.ErrLeaseLost):
		return ""
	case strings.Contains(err.Error(), "could not be renewed in time"):
		return "The lease of this test lasts 5 s, and no renewal was answered in time. See the round trip."
	}
	return "The lease was lost within seconds: the server drops keys, or another one answers now."
}

// unlockFinding unlocks, and returns a finding only if that failed.
func unlockFinding(lease *leased.Lease) []finding {
	err := lease.Unlock()
	if err == nil {
		return nil
	}
	return []finding{{verdictBad, "unlock", bare(err), meaningOfLoss(err), ""}}
}
