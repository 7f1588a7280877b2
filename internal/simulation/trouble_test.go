package simulation

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redisserver"
)

// trouble is a kind of trouble that some worlds have, or a check that goes with it.
// Each can be left out by name: -simulate.without='uncounted,rates'.
type trouble string

const (
	uncounted   trouble = "uncounted"   // inboxes at a replica: messages are delivered, but not counted
	rates       trouble = "rates"       // clocks are fast or slow by 1e-3
	farApart    trouble = "far apart"   // they are fast or slow by 4.9e-3
	helperKeys  trouble = "helper keys" // any of the lock's keys is deleted, not only that of its owner
	longHolds   trouble = "long holds"  // grants are renewed many times
	deadQueue   trouble = "dead queue"  // the queue begins with 150 to 600 dead requests
	olderState  trouble = "older state" // the server restarts from an older state
	refusals    trouble = "refusals"    // commands are answered with errors, or never sent
	silently    trouble = "silently"    // a pipeline's connection is refused, but its commands do not say so
	outages     trouble = "outages"     // all commands fail for a while
	backOff     trouble = "back-off"    // pauses after errors grow as the client's do
	suspensions trouble = "suspensions" // machines sleep: their monotonic clocks stand still
	anew        trouble = "anew"        // a lock that is not used is forgotten and made anew
	unlike      trouble = "unlike"      // clients differ in TTLs, tries and idle grants
	busy        trouble = "busy"        // callers unlock five times as often
	hashes      trouble = "other type"  // somebody puts a hash in the key's place
	uncounting  trouble = "uncounting"  // as in a Cluster: no count proves anything; and waiters die
	excuses     trouble = "excuses"     // check: the excuse for a loss ends when the loser can know of it
	intruders   trouble = "intruders"   // check: no Unlock returns nil after somebody else owned the lock
	heeds       trouble = "heeds"       // check: a process that is wanted and does not know whether it owns the lock asks at once
	checks      trouble = "checks"      // callers check their leases
	minHolds    trouble = "min holds"   // callers have minimum holds
	crowds      trouble = "crowds"      // four or five processes, and TTLs so long that re-checks are brief
	replicas    trouble = "replicas"    // grants count only when a replica has them, and it can take the server's place
	closes      trouble = "closes"      // clients are closed
	givesBack   trouble = "gives back"  // callers give up at the moment in which they are admitted
	tokensAhead trouble = "ahead"       // check: no token is ahead of the server's clock
)

// troubles lists the kinds of trouble, and how many of a hundred worlds have each.
var troubles = []struct {
	name    trouble
	percent int
}{
	{uncounted, 45}, {rates, 30}, {longHolds, 20}, {deadQueue, 10}, {olderState, 40}, {refusals, 50}, {silently, 30},
	{outages, 35}, {backOff, 30}, {suspensions, 25}, {anew, 50}, {unlike, 30}, {busy, 20}, {hashes, 20},
	{excuses, 100}, {intruders, 100}, {heeds, 100}, {tokensAhead, 100},
}

// uncountingPercent is how many of a hundred worlds are like a Cluster. They are drawn separately
// from the kinds above, so that the other seeds do what they did before there was this kind.
const uncountingPercent = 30

// farApartPercent is in how many of a hundred worlds clocks that run apart differ by nearly what the contract
// allows; helperKeysPercent, in how many any of the lock's keys may be deleted.
const farApartPercent, helperKeysPercent = 33, 33

// farApartRate is, in ppm, how fast or slow clocks are at most.
const farApartRate = 4900

// minHoldPercent is in how many of a hundred worlds callers have minimum holds.
const minHoldPercent = 30

// crowdPercent is in how many of a hundred worlds many wait for long.
const crowdPercent = 15

var simWith = flag.String("simulate.with", "", "kinds of trouble that every world has")

var simWithout = flag.String("simulate.without", "", "kinds of trouble to leave out, with commas between; see troubles")

// chooseTroubles draws the world's kinds of trouble. Leaving one out does not change which
// others a seed has.
func (w *world) chooseTroubles() {
	w.has = map[trouble]bool{}
	for _, each := range troubles {
		w.has[each.name] = w.rng.IntN(100) < each.percent
	}
	w.apart = rand.New(rand.NewPCG(uint64(w.seed), 1))
	w.has[uncounting] = w.apart.IntN(100) < uncountingPercent
	w.chooseChecks()
	w.cron = rand.New(rand.NewPCG(uint64(w.seed), 3))
	w.has[minHolds] = w.cron.IntN(100) < minHoldPercent
	w.many = rand.New(rand.NewPCG(uint64(w.seed), 4))
	w.has[crowds] = w.many.IntN(100) < crowdPercent
	w.chooseReplicas()
	w.chooseEnds()
	w.wider = rand.New(rand.NewPCG(uint64(w.seed), 77))
	w.has[farApart] = w.wider.IntN(100) < farApartPercent
	w.has[helperKeys] = w.wider.IntN(100) < helperKeysPercent
	for _, name := range strings.Split(*simWith, ",") {
		w.has[trouble(name)] = true
	}
	for _, name := range strings.Split(*simWithout, ",") {
		delete(w.has, trouble(name))
	}
	if w.has[crowds] {
		delete(w.has, uncounting) // there, no re-check is brief
	}
	if w.has[rates] {
		// The margin of a trust window covers only one of the two: clocks that run apart, or a
		// sleep that is too short to be noticed.
		delete(w.has, suspensions)
	}
	w.replicate()
	for name := range w.has {
		if w.has[name] && name != "" {
			w.count("world: " + string(name))
		}
	}
}

func (w *world) count(what string) { w.counts[what]++ }

// seedDead puts n requests into the queue whose processes are dead.
func (w *world) seedDead(n int) {
	// Only the scripts know how they keep a queue, so they make one to copy.
	owner, waiter := w.deadID(), w.deadID()
	for _, id := range []string{owner, waiter} {
		w.server.do(append([]string{"EVAL", redisserver.AcquireScript.Text.(string), "5"}, append(w.fiveKeys(),
			id, "1000", "1 "+w.srv.Inboxes)...)...)
	}
	sorted := w.server.do("TYPE", w.keys.Queue()) == any(simStatus("zset"))
	w.mini.FlushAll()
	w.clearWire()
	past := fmt.Sprint(w.serverNow().Add(-time.Second).UnixMilli())
	for i := range n {
		id := w.deadID()
		if sorted {
			w.server.do("ZADD", w.keys.Queue(), fmt.Sprint(i-n), id)
		} else {
			w.server.do("RPUSH", w.keys.Queue(), id)
		}
		if w.rng.IntN(2) == 0 {
			w.server.do("ZADD", w.keys.Waiters(), past, id)
		}
	}
	w.server.do("PEXPIRE", w.keys.Queue(), "20000")
	w.server.do("PEXPIRE", w.keys.Waiters(), "20000")
	w.logf("%d dead requests are queued", n)
}

func (w *world) fiveKeys() []string {
	var keys []string
	for _, k := range w.keys.All() {
		keys = append(keys, k.(string))
	}
	return keys
}

func (w *world) clearWire() { w.wire = nil }

// killed puts n requests into the queue whose processes have just been killed.
func (w *world) killed(n int) {
	w.longest = max(w.longest, 10*time.Second) // a request that finds the lock free owns it for that long
	for range n {
		w.count("a waiter is killed")
		id := fmt.Sprintf("leased1:%c:10000:p:%s:%s:dead", "wr"[w.apart.IntN(2)], randomText(w.apart), strings.Repeat("K", 16))
		w.server.do(append([]string{"EVAL", redisserver.AcquireScript.Text.(string), "5"}, append(w.fiveKeys(),
			id, "10000", "1 "+w.srv.Inboxes)...)...)
		w.logf("%s is queued, and killed", short(id))
	}
	w.lookAgain()
}

func (w *world) deadID() string {
	return "leased1:w:1000:c:" + randomText(w.rng) + ":" + strings.Repeat("D", 16) + ":dead"
}

func randomText(rng *rand.Rand) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	var b [16]byte
	for i := range b {
		b[i] = digits[rng.IntN(len(digits))]
	}
	return string(b[:])
}

// savedKey is a key in an older state.
type savedKey struct {
	name  string
	write []string
	ends  time.Time // by the server's clock
}

// save keeps the server's state, as its disk would.
func (w *world) save() {
	w.saved = nil
	for _, k := range w.mini.Keys() {
		s := savedKey{name: k}
		switch kind := w.server.do("TYPE", k); kind {
		case any(simStatus("string")):
			s.write = []string{"SET", k, w.server.do("GET", k).(string)}
		case any(simStatus("list")):
			s.write = append([]string{"RPUSH", k}, w.queued()...)
		case any(simStatus("zset")):
			s.write = []string{"ZADD", k}
			for _, z := range w.scores(k) {
				s.write = append(s.write, fmt.Sprintf("%.0f", z.score), z.member)
			}
		default:
			continue
		}
		s.ends = w.serverNow().Add(time.Duration(w.server.do("PTTL", k).(int)) * time.Millisecond)
		w.saved = append(w.saved, s)
	}
	w.logf("the server saves its state")
}

// restore restarts the server from its disk.
func (w *world) restore() {
	w.accident("the server restarts from an older state")
	w.load()
	v := w.look()
	for _, id := range append(sortedKeys(v.readers), append(v.queue, v.value)...) {
		w.copied[id] = true // it can own again after its release
	}
}

// load replaces the server's state by the one that was saved.
func (w *world) load() {
	w.mini.FlushAll()
	clear(w.server.known)
	w.server.do("SCRIPT", "FLUSH")
	for _, s := range w.saved {
		left := s.ends.Sub(w.serverNow()).Milliseconds()
		if left <= 0 {
			continue
		}
		w.server.do(s.write...)
		w.server.do("PEXPIRE", s.name, fmt.Sprint(left))
	}
	// The server has also forgotten the owners that came and went since then: to it, an owner in the
	// saved state has owned the lock throughout.
	clear(w.intruded)
}

var simRefusals = []error{
	simAnswer("READONLY You can't write against a read only replica."),
	simAnswer("OOM command not allowed when used memory > 'maxmemory'."),
	simAnswer("NOPERM User u has no permissions to run the 'evalsha' command"),
	simAnswer("LOADING Redis is loading the dataset in memory"),
	&net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")},
	redis.ErrPoolTimeout,
	errWrongPassword,
}

var errWrongPassword = simAnswer("WRONGPASS invalid username-password pair or user is disabled.")

// refused makes a command or a pipeline fail before the server executes it.
func (w *world) refused(p *packet, err error, silent bool) {
	if silent {
		w.count("a pipeline is refused silently")
	} else {
		w.count("error: " + strings.Fields(err.Error())[0])
	}
	w.logf("refused: %s of %s: %v", p.kind, p.c.name, err)
	w.refusing = true
	w.server.stop = func() (error, bool) { return err, silent }
	w.wire = append(w.wire, w.execute(p))
	w.server.stop, w.refusing = nil, false
}

// fall makes all commands fail for a while. Sometimes nothing else happens meanwhile, and
// the pauses grow until they outlive the outage.
func (w *world) fall() {
	d := time.Duration(w.rng.IntN(20000)) * time.Millisecond
	w.outageErr = nil
	if w.rng.IntN(3) > 0 {
		w.outageErr = simRefusals[w.rng.IntN(len(simRefusals))]
	}
	w.count("an outage")
	w.logf("an outage of %v: %v", d, w.outageErr)
	w.outage = w.now.Add(d)
	if w.has[backOff] && w.rng.IntN(2) == 0 {
		w.pass(d)
	}
}

// quiet lets d pass without trouble. Nobody unlocks meanwhile.
func (w *world) quiet(d time.Duration) {
	w.logf("a quiet time of %v", d)
	w.count("a long hold")
	w.pass(d)
}

// pass lets d pass, with each packet delivered at once.
func (w *world) pass(d time.Duration) {
	was := w.calm
	w.calm = true
	for end := w.now.Add(d); w.now.Before(end) && w.failure == ""; {
		for len(w.wire) > 0 && w.failure == "" {
			if !w.deliver(99) {
				break
			}
			w.check()
		}
		w.advance(10 * time.Millisecond)
		w.check()
	}
	w.calm = was
}
