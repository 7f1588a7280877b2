package redisserver

import (
	"flag"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/race"
	"github.com/leasedmutex/leased/internal/redistest"
)

var differentialSeeds = flag.Int("differential.seeds", 30, "random sequences that the embedded and the real server have to agree on")

// TestTheEmbeddedServerAnswersLikeARealOne takes the same random steps on both servers, and compares
// answers, messages and keys after each. What other tests prove on the embedded server holds
// on a real one as far as the two agree. To run a failed seed alone, use -differential.from.
func TestTheEmbeddedServerAnswersLikeARealOne(t *testing.T) {
	for _, quorum := range []bool{false, true} {
		t.Run(fmt.Sprintf("of a quorum %v", quorum), func(t *testing.T) { testDifferences(t, quorum) })
	}
}

// On Dragonfly, the same, because the scripts use no score and no reading of the clock as text.
func TestScriptsThatReadNumbersDoTheSame(t *testing.T) {
	for _, quorum := range []bool{false, true} {
		t.Run(fmt.Sprintf("of a quorum %v", quorum), func(t *testing.T) { testDifferences(t, quorum, numbers{}) })
	}
}

// testDifferences does so with servers that are used alone, or as members of a quorum. In a quorum,
// requests are placed by tickets, tokens are written back, and answers come with the server's mark.
// The hooks are of the real server's client.
func testDifferences(t *testing.T, quorum bool, hooks ...redis.Hook) {
	t.Parallel()
	in := redistest.Shared(t)
	server := redistest.MiniTCP(t)
	prefix := redistest.Prefix(t)
	seeds := *differentialSeeds
	if testing.Short() {
		seeds = min(seeds, 10)
	}
	if race.Enabled {
		seeds = min(seeds, 3)
	}
	d := &twins{t: t, quorum: quorum}
	for i, rdb := range []*redis.Client{clientOf(t, server.Addr()), in.Client()} {
		redistest.CheckLeaks(t, rdb, prefix)
		d.sides[i] = newScene(t, rdb, prefix, "x")
		if quorum {
			d.sides[i].srv = NewMember(d.sides[i].srv.Rdb, prefix, time.Minute)
		}
	}
	for _, hook := range hooks {
		d.sides[1].srv.Rdb.AddHook(hook)
	}
	// C has no inbox on either side, so its "c" ids are proved gone.
	for i, s := range d.sides {
		d.inboxes[i] = []*listener{s.listen("A"), s.listen("B")}
	}
	for n := range seeds {
		seed := *differentialFrom + int64(n)
		if !d.run(seed) {
			t.Fatalf("seed %d (-differential.from=%d -differential.seeds=1):\n%s", seed, seed, strings.Join(d.log, "\n"))
		}
	}
	d.clear()
	for _, s := range d.sides {
		s.raw("DEL", protocol.MarkKey(prefix))
	}
}

var differentialFrom = flag.Int64("differential.from", 1, "first seed of the sequences")

// twins is one lock on two servers.
type twins struct {
	t       *testing.T
	sides   [2]*scene
	inboxes [2][]*listener
	names   [2]ranks
	quorum  bool
	marks   [2]uint64
	quick   bool  // some grants are provisional
	slack   int64 // the longest time in ms between the same step on the two servers
	carried int64 // how many steps may have set an expiry to what PTTL said
	rng     *rand.Rand
	ids     []string
	past    []step // for late copies
	log     []string
}

const stepsASeed = 40

func (d *twins) run(seed int64) bool {
	d.rng = rand.New(rand.NewSource(seed))
	d.names, d.slack, d.carried, d.log, d.past, d.ids = [2]ranks{}, 0, 0, nil, nil, nil
	d.quick = d.rng.Intn(4) == 0
	began := time.Now()
	d.clear()
	for range stepsASeed {
		if d.quick && provisionalEnds(began) {
			return true // it may have ended on only one of the two servers
		}
		if !d.act() {
			return d.quick && provisionalEnds(began)
		}
	}
	return true
}

func (d *twins) clear() {
	for i, s := range d.sides {
		s.clear()
		for _, l := range d.inboxes[i] {
			l.received()
		}
	}
}

func (d *twins) fresh() string {
	s := d.sides[0]
	client := string("ABC"[d.rng.Intn(3)])
	id := s.id(client, protocol.Mode("wwr"[d.rng.Intn(3)]), []time.Duration{100 * time.Second, 300 * time.Second, time.Hour}[d.rng.Intn(3)])
	if d.rng.Intn(2) == 0 {
		id = counted(id)
	} else if d.quick {
		id = provisional(id)
	}
	d.ids = append(d.ids, id)
	return id
}

// known returns one of the ids used last.
func (d *twins) known() string {
	if len(d.ids) == 0 {
		return d.fresh()
	}
	return d.ids[max(0, len(d.ids)-1-d.rng.Intn(8))]
}

// ticket returns what decides a request's place in the queue on a quorum's server. Some tickets are
// equal.
func (d *twins) ticket() uint64 {
	if !d.quorum {
		return 0
	}
	return 1_700_000_000_000_000 + uint64(d.rng.Intn(8))
}

// mark changes the servers' marks as a restart that loses the data, or other events, can.
func (d *twins) mark() {
	n := d.rng.Intn(3)
	d.log = append(d.log, fmt.Sprintf("mischief %d of the mark", n))
	for _, s := range d.sides {
		switch key := protocol.MarkKey(strings.TrimSuffix(s.keys.Lock, "x")); n {
		case 0:
			s.raw("DEL", key)
		case 1:
			s.raw("SET", key, "1")
		case 2: // ahead of the clock, which was set back
			s.raw("SET", key, "9000000000000000")
		}
	}
}

func (d *twins) act() bool {
	switch n := d.rng.Intn(20); {
	case n < 5:
		return d.take(step{what: []string{"acquire", "acquire", "try"}[d.rng.Intn(3)], id: d.fresh(), ticket: d.ticket()})
	case n < 16:
		st := step{
			what:   []string{"acquire", "try", "question", "release", "release", "yield", "cancel", "renew", "downgrade"}[d.rng.Intn(9)],
			id:     d.known(),
			used:   []uint64{0, 0, 2, 7_200_000_000}[d.rng.Intn(4)],
			cool:   someCooldown(d.rng),
			ticket: d.ticket(),
		}
		if d.quorum && d.rng.Intn(6) == 0 {
			st.what, st.used = "adopt", max(1, st.used)
		}
		if st.what == "yield" {
			st.next = d.fresh()
		}
		if st.what == "downgrade" {
			for st.next = d.fresh(); !strings.HasPrefix(st.next, "leased1:r"); st.next = d.fresh() {
			}
			if !strings.HasPrefix(st.id, "leased1:w") { // only a writer can be downgraded
				st.what = "release"
			}
		}
		return d.take(st)
	case n == 16 && len(d.past) > 0: // a late copy
		return d.take(d.past[d.rng.Intn(len(d.past))])
	case n == 17:
		st := step{what: "evict"}
		if d.quorum {
			st.used = []uint64{0, 2, 7_200_000_000}[d.rng.Intn(3)]
		}
		return d.take(st)
	case n == 18 && d.quorum:
		d.mark()
	}
	return d.mischief()
}

// mischief changes the keys as foreign clients can, and ends leases that would otherwise end only
// by waiting.
func (d *twins) mischief() bool {
	id, n := d.known(), d.rng.Intn(9)
	began := time.Now()
	d.log = append(d.log, fmt.Sprintf("mischief %d of %s", n, id))
	for _, s := range d.sides {
		st := s.look()
		switch n {
		case 0:
			s.raw("SET", s.keys.Lock, "foreign", "NX", "PX", 200_000)
		case 1:
			if st.value == "foreign" {
				s.raw("DEL", s.keys.Lock)
			}
		case 2: // the owner's lease ends
			if st.value != protocol.MarkerValue {
				s.raw("DEL", s.keys.Lock)
			}
		case 3, 4: // a reader's lease ends, and the marker expires with the last one
			if _, reads := st.readers[id]; reads {
				s.raw("ZADD", s.keys.Readers(), "XX", st.clock-50_000, id)
				delete(st.readers, id)
				top := int64(0)
				for _, ends := range st.readers {
					top = max(top, ends)
				}
				if st.value == protocol.MarkerValue {
					s.raw("PEXPIREAT", s.keys.Lock, top)
				}
			}
		case 5: // a waiter's lease ends
			s.raw("ZADD", s.keys.Waiters(), "XX", st.clock-50_000, id)
		case 6: // a real expiry, for which there is no event to wait for
			s.raw("PEXPIRE", s.keys.Lock, 1)
			for s.raw("EXISTS", s.keys.Lock) != int64(0) {
				time.Sleep(time.Millisecond) // between two polls
			}
		case 7:
			s.raw("DEL", s.keys.Meta())
		case 8:
			s.clear()
		}
	}
	d.lasted(began)
	return d.same()
}

// lasted records how far apart in time the two servers may have run a step.
func (d *twins) lasted(began time.Time) {
	d.slack = max(d.slack, time.Since(began).Milliseconds()+1)
}

// take runs a step on both sides and compares everything.
func (d *twins) take(st step) bool {
	d.past = append(d.past, st)
	d.log = append(d.log, fmt.Sprintf("%+v", st))
	began := time.Now()
	var got [2]string
	for i, s := range d.sides {
		r := s.take(st)
		got[i] = r.meaning(&d.names[i])
		if r.Mark != 0 {
			got[i] += fmt.Sprint(" marked anew ", r.Mark != d.marks[i], " long ago ", r.Mark == 1)
			d.marks[i] = r.Mark
		}
		if r.failed {
			d.log = append(d.log, r.err.Error())
		}
		for _, l := range d.inboxes[i] {
			for _, m := range unordered(l.received()) {
				got[i] += fmt.Sprint("\n    told ", l.channel, ": ", m.Kind, " ", m.ID, " ", m.Key, " ", d.names[i].name(m.Token), " ", m.More, " ", m.Nonce)
			}
		}
	}
	d.lasted(began)
	d.carried++
	d.log = append(d.log, "  "+got[0])
	if got[0] != got[1] {
		d.log = append(d.log, "the real one: "+got[1])
		return false
	}
	return d.same()
}

// unordered sorts the messages that go to all readers by id. They are sent in the order in which the
// readers' leases end, and two leases may end in the same millisecond on one server but not on the
// other.
func unordered(all []protocol.Message) []protocol.Message {
	for from := 0; from < len(all); {
		to := from + 1
		for to < len(all) && all[to].Kind == all[from].Kind {
			to++
		}
		if kind := all[from].Kind; kind == protocol.MessageWanted || kind == protocol.MessageRevoked {
			slices.SortFunc(all[from:to], func(a, b protocol.Message) int { return strings.Compare(a.ID, b.ID) })
		}
		from = to
	}
	return all
}

// same compares the keys. An expiry was set by some step, so it differs by no more than the
// longest step took, and by 1 ms more for each step that set it again to what PTTL returned:
// the embedded server counts nanoseconds, which its PTTL cuts off. A look adds less than 3 ms,
// because it reads the clock and PTTL at different times, and both are cut off to milliseconds.
func (d *twins) same() bool {
	a, b := d.sides[0].look(), d.sides[1].look()
	one, two := a.shape(&d.names[0]), b.shape(&d.names[1])
	if one != two {
		d.log = append(d.log, "the embedded server has\n"+one, "the real one has\n"+two)
		return false
	}
	if drift := a.drift(b, d.slack+d.carried+3); drift != "" {
		d.log = append(d.log, one, drift)
		return false
	}
	return true
}
