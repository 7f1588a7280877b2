package redisserver

import (
	"fmt"
	"maps"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// pair is two clients of one lock, A and B, each with a few requests, and what they know from answers
// and messages. Both have an inbox. C and D speak like A and B. They are killed as soon as they
// wait, so that nobody listens to their inboxes. Nothing expires, except where a step says so.
type pair struct {
	t       *testing.T
	s       *scene
	callers map[string]*speaker
	inbox   map[string]*listener

	rng        *rand.Rand
	owns       map[string]uint64    // id → token, as its client knows it
	asked      map[string]bool      // id that owns → whether its client knows that others wait
	waiting    []string             // in the order of their answers; on a quorum's server, of their tickets
	gone       map[string]bool      // of those that wait: whether they were killed
	unsure     map[string]time.Time // id that owns provisionally → a time before it was granted the lock
	cooling    string               // who gave the lock back and has it kept; "" for nobody
	ended      []string             // to send late copies of their commands
	downgrades []step               // all that were sent, also for late copies
	tickets    map[string]uint64    // on a quorum's server
	mark       uint64               // which a quorum's server has told, 0 for none
	far        bool                 // whether tokens may be far ahead of the clock
	top        uint64               // greatest token so far
	log        []string
}

const (
	someTicket   = uint64(1_700_000_000_000_000)
	ticketsApart = uint64(1_000)
)

func newPair(t *testing.T, s *scene, versions map[string]map[string]Script) *pair {
	p := &pair{t: t, s: s, inbox: map[string]*listener{"A": s.listen("A"), "B": s.listen("B")}, callers: map[string]*speaker{}}
	for name, like := range map[string]string{"A": "A", "B": "B", "C": "A", "D": "B"} {
		p.callers[name] = &speaker{s: s, scripts: versions[like]}
	}
	return p
}

func client(id string) string { return id[len(id)-1:] }

func writes(id string) bool { return strings.HasPrefix(id, "leased1:w") }

// overtime ends a run, without a verdict, because the machine was stopped for so long that a provisional
// grant may have expired.
type overtime struct{}

func (p *pair) fail(format string, args ...any) {
	p.t.Helper()
	for _, since := range p.unsure {
		if provisionalEnds(since) {
			panic(overtime{})
		}
	}
	p.t.Fatalf("%s\n%s\n%s", strings.Join(p.log, "\n"), fmt.Sprintf(format, args...), p.s.look().shape(&ranks{}))
}

// clear deletes the lock, and the mark of a quorum's server.
func (p *pair) clear() {
	p.s.clear()
	if p.s.srv.mark != "" {
		p.s.raw("DEL", p.s.srv.mark)
	}
}

func (p *pair) run(seed int64) {
	defer func() {
		if e := recover(); e != nil && e != any(overtime{}) {
			panic(e)
		}
	}()
	p.rng = rand.New(rand.NewSource(seed))
	p.owns, p.asked, p.waiting, p.gone = map[string]uint64{}, map[string]bool{}, nil, map[string]bool{}
	p.unsure, p.cooling, p.ended, p.downgrades = map[string]time.Time{}, "", nil, nil
	p.tickets, p.mark = map[string]uint64{}, 0
	p.far = p.rng.Intn(3) == 0
	p.top, p.log = 0, []string{fmt.Sprint("seed ", seed)}
	p.clear()
	// The mark of a quorum's server is old or ahead of the clock, or there is none yet.
	if n := p.rng.Intn(4); p.s.srv.mark != "" && n > 0 {
		p.s.raw("SET", p.s.srv.mark, []string{"1700000000000000", "1700000000000001", "9000000000000000"}[n-1])
	}
	for range 40 {
		p.act()
	}
	for range 60 { // releases only: all waiters must be served
		if len(p.owns) == 0 && p.cooling == "" {
			break
		}
		if p.cooling != "" {
			p.coolsDown()
			continue
		}
		p.take(step{what: "release", id: p.owner()})
	}
	if len(p.owns)+len(p.waiting) > 0 {
		p.fail("%v own and %v wait forever", p.owns, p.waiting)
	}
}

func (p *pair) owners() []string { return slices.Sorted(maps.Keys(p.owns)) }

// owner returns one of the owners, or "".
func (p *pair) owner() string { return p.oneOf(p.owners()) }

func (p *pair) oneOf(ids []string) string {
	if len(ids) == 0 {
		return ""
	}
	return ids[p.rng.Intn(len(ids))]
}

// alive returns those that wait and were not killed.
func (p *pair) alive() (ids []string) {
	for _, id := range p.waiting {
		if !p.gone[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// fresh returns a new request of A or B, with any proof and with or without an idle hold.
func (p *pair) fresh() string {
	id := p.s.id(string("AB"[p.rng.Intn(2)]), protocol.Mode("wwr"[p.rng.Intn(3)]), long)
	proof := []string{":c:", ":c:", ":p:", ":u:", ":ci:", ":ci:", ":pi:", ":ui:"}[p.rng.Intn(8)]
	return strings.Replace(id, ":u:", proof, 1)
}

func (p *pair) act() {
	owner := p.owner()
	if p.cooling != "" && p.rng.Intn(4) == 0 {
		p.coolsDown()
		return
	}
	switch n := p.rng.Intn(20); {
	case n < 3 && len(p.waiting) < 6:
		p.take(step{what: []string{"acquire", "newcomer"}[p.rng.Intn(2)], id: p.fresh()})
	case n == 3:
		p.take(step{what: "try", id: p.fresh()})
	case n < 6 && owner != "":
		p.take(step{what: []string{"release", "release", "cancel"}[p.rng.Intn(3)], id: owner, used: p.ahead(), cool: p.cool()})
	case n == 6 && owner != "":
		next := p.s.id(client(owner), protocol.Mode("wr"[p.rng.Intn(2)]), long)
		p.take(step{what: "yield", id: owner, next: next, used: p.ahead(), cool: p.cool()})
	case n == 7 && owner != "":
		p.take(step{what: []string{"renew", "acquire", "question"}[p.rng.Intn(3)], id: owner})
	case n == 8 && len(p.alive()) > 0:
		p.take(step{what: []string{"cancel", "acquire", p.brief()}[p.rng.Intn(3)], id: p.oneOf(p.alive())})
	case n == 9 && len(p.ended) > 0: // late copies of a release do nothing
		p.take(step{what: []string{"release", "cancel", "renew", "question"}[p.rng.Intn(4)], id: p.oneOf(p.ended), cool: p.cool()})
	case n == 10 && len(p.ended) > 0:
		id := p.oneOf(p.ended)
		next := p.s.id(client(id), protocol.Exclusive, long)
		p.take(step{what: "yield", id: id, next: next, cool: p.cool()})
	case (n == 11 || n == 12) && writes(owner):
		st := step{what: "downgrade", id: owner, next: p.s.id(client(owner), protocol.Shared, long), used: p.ahead()}
		p.downgrades = append(p.downgrades, st)
		p.take(st)
	case n == 13 && len(p.downgrades) > 0:
		p.take(p.downgrades[p.rng.Intn(len(p.downgrades))])
	case n == 14 && p.rng.Intn(2) == 0:
		p.evict(string("AB"[p.rng.Intn(2)]))
	case n == 15 && len(p.alive()) > 0:
		p.dies(p.oneOf(p.alive()))
	case (n == 16 || n == 19) && len(p.waiting) < 6:
		p.isKilled()
	case n == 17 && owner != "" && p.s.srv.mark != "":
		p.take(step{what: "adopt", id: owner, used: max(1, p.ahead())})
	case n == 18 && owner != "":
		p.take(step{what: "question", id: owner})
	}
}

// brief is the step in which one that waits only says that it is there. No quorum's server is sent it.
func (p *pair) brief() string {
	if p.s.srv.mark != "" {
		return "acquire"
	}
	return "briefly"
}

// ahead returns by how much the last token that an owner assigned locally exceeds the token of its
// grant. An hour's worth is more than the server's clock can catch up with during the test. From then on
// no shortcut is taken, so most runs go without.
func (p *pair) ahead() uint64 {
	most := 3
	if p.far {
		most = 4
	}
	return []uint64{0, 0, 5, 3_600_000_000}[p.rng.Intn(most)]
}

// cool returns what is left of a minimum hold, or 0.
func (p *pair) cool() time.Duration { return []time.Duration{0, 0, 0, minHold}[p.rng.Intn(4)] }

// minHold does not end during a test.
const minHold = 10 * time.Minute

// dies has the waiting lease of id end, as if its process had crashed a TTL ago.
func (p *pair) dies(id string) {
	p.s.dies(id)
	p.log = append(p.log, "its waiting lease ends: "+id)
	p.ends(id)
	p.turn()
}

// isKilled has a request wait whose process is killed then. It is dropped when its turn comes, because
// nobody listens to its inbox.
func (p *pair) isKilled() {
	mode := protocol.Mode("wwr"[p.rng.Intn(3)])
	owner := p.owner()
	if p.cooling == "" && (owner == "" || !writes(owner) && len(p.waiting) == 0 && mode == protocol.Shared) {
		return // it would be an owner
	}
	id := counted(p.s.id(string("CD"[p.rng.Intn(2)]), mode, long))
	p.gone[id] = true
	p.take(step{what: "newcomer", id: id})
	if !slices.Contains(p.waiting, id) {
		p.fail("%s does not wait", id)
	}
}

// coolsDown ends a cool-down.
func (p *pair) coolsDown() {
	p.s.raw("DEL", p.s.keys.Lock)
	p.log = append(p.log, "the cool-down ends")
	p.cooling = ""
	p.turn()
}

// turn is a step that finds what has ended: Redis does nothing by itself.
func (p *pair) turn() {
	var all []step
	for _, id := range p.alive() {
		all = append(all, step{what: "acquire", id: id}, step{what: "cancel", id: id})
	}
	for id := range p.owns {
		if !writes(id) {
			all = append(all, step{what: "question", id: id}, step{what: "acquire", id: id})
		}
	}
	slices.SortFunc(all, func(a, b step) int { return strings.Compare(a.id+a.what, b.id+b.what) })
	all = append(all, step{what: "try", id: p.fresh()}, step{what: "newcomer", id: p.fresh()})
	if n := p.rng.Intn(len(all) + 1); n < len(all) {
		p.take(all[n])
	} else {
		p.evict(string("AB"[p.rng.Intn(2)]))
	}
}

// ticket returns the ticket of id. That of a writer that asks for the first time may be less than those of
// some that wait already, whose commands were faster.
func (p *pair) ticket(id string, asks bool) uint64 {
	if t, ok := p.tickets[id]; ok || id == "" {
		return t
	}
	t := someTicket + ticketsApart*uint64(1+len(p.tickets))
	if before := p.oneOf(p.waiting); before != "" && asks && writes(before) && writes(id) && p.rng.Intn(3) == 0 {
		early := p.tickets[before] - 10
		if !slices.Contains(slices.Collect(maps.Values(p.tickets)), early) {
			t = early
		}
	}
	p.tickets[id] = t
	return t
}

// joins puts id in its place among those that wait.
func (p *pair) joins(id string) {
	place := len(p.waiting)
	for p.s.srv.mark != "" && place > 0 && p.tickets[p.waiting[place-1]] > p.tickets[id] {
		place--
	}
	p.waiting = slices.Insert(p.waiting, place, id)
}

// take runs a step and compares its answer, and what was published meanwhile, with what is known.
func (p *pair) take(st step) {
	since := time.Now()
	token, owned := p.owns[st.id]
	waited := slices.Contains(p.waiting, st.id)
	asked := st.id
	if st.next != "" {
		asked = st.next
	}
	st.ticket = p.ticket(asked, st.what == "acquire" || st.what == "newcomer")
	last := uint64(0)
	if st.used > 0 {
		last = token + st.used // tokens assigned locally
	}
	a := p.callers[client(st.id)].take(st, last)
	p.log = append(p.log, fmt.Sprintf("%+v last %d: %+v", st, last, a))
	p.top = max(p.top, last)
	if a.Mark > 0 && a.Outcome != protocol.NotOurs {
		p.sees(a.Mark)
	}

	o := a.Outcome
	switch st.what {
	case "release", "cancel", "yield":
		if owned && o == protocol.NotOurs || !owned && st.what != "cancel" && o != protocol.NotOurs {
			p.fail("%+v: owned %v, answered %d", st, owned, o)
		}
		p.ends(st.id)
		if st.next == "" {
			asked = ""
		}
		if owned && writes(st.id) && st.cool > 0 {
			p.cooling = st.id
		}
	case "downgrade":
		_, again := p.owns[st.next]
		if (owned || again) != (o == protocol.Granted) {
			p.fail("%+v: owned %v, its next %v, answered %d", st, owned, again, o)
		}
		p.ends(st.id)
	case "question":
		if owned != (o == protocol.Granted) || !owned && o != protocol.NotOurs {
			p.fail("%+v: owned %v, answered %d", st, owned, o)
		}
	case "adopt":
		if owned != (o == protocol.Done) {
			p.fail("%+v: owned %v, answered %d", st, owned, o)
		}
		p.owns[st.id] = last
		asked = ""
	case "renew":
		if owned != (o == protocol.Granted) {
			p.fail("%+v: owned %v, answered %d", st, owned, o)
		}
		delete(p.unsure, st.id)
		return
	}
	handed, _, ends := p.told(since) // grants that were published before the answer was sent
	if asked != "" && o == protocol.Granted {
		if again, ok := p.owns[asked]; ok && !handed[asked] {
			a.Token = max(a.Token, again) // it owned already
		} else {
			handed[asked] = true
		}
		p.owns[asked] = a.Token
		p.asked[asked] = a.More
		delete(p.unsure, asked)
		if queued := len(p.s.look().queue) > 0; a.More != queued {
			p.fail("%s is told %v, and others wait: %v", asked, a.More, queued)
		}
		if d := p.s.ownsFor(asked); d <= protocol.ProvisionalTTL {
			p.fail("%s was answered, and owns for %v", asked, d)
		}
	}
	if st.what == "downgrade" && handed[asked] { // it owns before the readers in the queue do
		delete(handed, asked)
		p.grew(asked)
	}
	p.served(handed, asked)
	if asked != "" && o == protocol.Enqueued { // behind those who were let in first, whatever its ticket
		if !slices.Contains(p.waiting, asked) {
			p.joins(asked)
		}
		if place := slices.Index(p.s.look().queue, asked); !a.Brief && a.Place != place {
			p.fail("%s is told that it is at place %d, and is at %d", asked, a.Place, place)
		}
		if p.cooling != "" && !a.Brief && (a.Left <= 0 || a.NoNotify) {
			p.fail("%s is not told when the cool-down ends", asked)
		}
	}
	if p.cooling != "" && (owned && st.cool > 0 || waited && st.what == "cancel") {
		p.isTold(ends, st.next)
	}
	if waited && st.what == "cancel" && len(p.s.look().queue) == 0 {
		for id := range p.owns {
			if !writes(id) && p.asked[id] {
				p.fail("%s still believes that others wait", id)
			}
		}
	}
	p.check()
	p.confirm()
}

// sees checks that both versions are told the same mark, which is the one in Redis.
func (p *pair) sees(mark uint64) {
	if p.mark == 0 {
		p.mark = mark
	}
	if stored := p.s.raw("GET", p.s.srv.mark); mark != p.mark || stored != fmt.Sprint(mark) {
		p.fail("the mark is %d, it was %d, and Redis has %v", mark, p.mark, stored)
	}
}

// isTold checks that the head of the queue was told when a cool-down ends.
func (p *pair) isTold(ends map[string]time.Duration, except string) {
	if len(p.waiting) == 0 || p.gone[p.waiting[0]] || p.waiting[0] == except {
		return
	}
	if left := ends[p.waiting[0]]; left <= 0 || left > minHold {
		p.fail("%s was told that it ends in %v", p.waiting[0], left)
	}
}

// confirm has those that were made owners provisionally say that they are there, or be dead.
func (p *pair) confirm() {
	for len(p.unsure) > 0 {
		id := slices.Sorted(maps.Keys(p.unsure))[0]
		since := p.unsure[id]
		if provisionalEnds(since) {
			panic(overtime{})
		}
		if d := p.s.ownsFor(id); d <= 0 || d > protocol.ProvisionalTTL {
			p.fail("%s owns for %v before it has said that it is there", id, d)
		}
		if p.rng.Intn(3) == 0 {
			delete(p.unsure, id)
			p.expires(id)
			continue
		}
		p.take(step{what: []string{"renew", "acquire"}[p.rng.Intn(2)], id: id})
		if _, owned := p.owns[id]; !owned {
			continue // take went on with others that are unsure, and so could end in an eviction
		}
		if d := p.s.ownsFor(id); d <= protocol.ProvisionalTTL {
			p.fail("%s owns for %v after it has said that it is there", id, d)
		}
	}
}

// expires ends the lease of id, an owner.
func (p *pair) expires(id string) {
	switch {
	case len(p.owns) == 1:
		p.s.raw("DEL", p.s.keys.Lock, p.s.keys.Readers())
	default:
		p.s.raw("ZADD", p.s.keys.Readers(), "XX", p.s.now()-1, id)
	}
	p.log = append(p.log, "its lease ends: "+id)
	p.ends(id)
	p.turn()
}

// told reads both inboxes and returns which ids were granted, which were evicted with
// which token, and which were told when a lease or a cool-down ends. since is a time before the step that
// published all this.
func (p *pair) told(since time.Time) (handed map[string]bool, revoked map[string]uint64, ends map[string]time.Duration) {
	handed, revoked, ends = map[string]bool{}, map[string]uint64{}, map[string]time.Duration{}
	for _, name := range []string{"A", "B"} {
		for _, m := range p.inbox[name].received() {
			p.log = append(p.log, fmt.Sprintf("    %s %s %d", m.Kind, m.ID, m.Token))
			if client(m.ID) != name {
				p.fail("%s received what is for %s", name, m.ID)
			}
			switch m.Kind {
			case protocol.MessageGranted:
				handed[m.ID] = true
				p.owns[m.ID] = m.Token
				p.asked[m.ID] = m.More
				if who, err := protocol.ParseID(m.ID); err == nil && who.Proof == protocol.Provisionally {
					p.unsure[m.ID] = since
				}
			case protocol.MessageRevoked:
				revoked[m.ID] = m.Token
			case protocol.MessageWanted, protocol.MessageUnwanted:
				p.asked[m.ID] = m.Kind == protocol.MessageWanted
			case protocol.MessageEnds:
				ends[m.ID] = m.Left
			}
		}
	}
	return handed, revoked, ends
}

// evict evicts the owners. It checks that each is notified, whatever its version, with a token that
// is not below its own, and that those who may enter next are granted the lock.
func (p *pair) evict(by string) {
	since := time.Now()
	owners := p.owners()
	want := owners
	if p.cooling != "" {
		want = []string{p.s.look().value}
	}
	evicted := p.callers[by].evict()
	p.log = append(p.log, fmt.Sprintf("evict by %s: %q", by, evicted))
	p.cooling = ""
	handed, revoked, _ := p.told(since)
	slices.Sort(evicted)
	if !slices.Equal(evicted, want) || len(revoked) != len(owners) {
		p.fail("evicted %q, told %v, owners %q", evicted, revoked, want)
	}
	for _, id := range owners {
		if token, ok := revoked[id]; !ok || token < p.owns[id] {
			p.fail("%s has token %d, and was told of %d", id, p.owns[id], token)
		}
		p.ends(id)
	}
	p.served(handed, "")
	p.check()
	p.confirm()
}

func (p *pair) ends(id string) {
	delete(p.owns, id)
	delete(p.asked, id)
	delete(p.unsure, id)
	p.waiting = slices.DeleteFunc(p.waiting, func(w string) bool { return w == id })
	p.ended = append(p.ended, id)
}

// served checks the order and the tokens of the ids that were just made owner. asked can
// have been granted at once, if the queue was empty or only readers were ahead of it. Those that were
// killed are passed over.
func (p *pair) served(handed map[string]bool, asked string) {
	for len(p.waiting) > 0 {
		first := p.waiting[0]
		switch {
		case handed[first] && !p.gone[first]:
			delete(handed, first)
			p.grew(first)
		case p.gone[first] && !slices.Contains(p.s.look().queue, first):
		default:
			first = ""
		}
		if first == "" {
			break
		}
		p.waiting = p.waiting[1:]
	}
	if handed[asked] && len(p.waiting) == 0 {
		delete(handed, asked)
		p.grew(asked)
	}
	if len(handed) > 0 {
		p.fail("%v were let in before %v", handed, p.waiting)
	}
}

// grew checks that the token of id, which was just granted the lock, is above all earlier ones.
func (p *pair) grew(id string) {
	token := p.owns[id]
	if token <= p.top {
		p.fail("%s has token %d after %d", id, token, p.top)
	}
	p.top = token
}

// check compares what the clients know with what Redis holds.
func (p *pair) check() {
	owners := p.owners()
	writers := 0
	for _, id := range owners {
		if writes(id) {
			writers++
		}
		if len(p.waiting) > 0 && !p.asked[id] {
			p.fail("%s owns, and does not know that %q wait", id, p.waiting)
		}
	}
	if writers > 1 || writers == 1 && len(owners) > 1 || p.cooling != "" && len(owners) > 0 {
		p.fail("%q own at once, and the lock is kept for %q", owners, p.cooling)
	}
	if len(p.waiting) > 0 && writers == 0 && p.cooling == "" && (len(owners) == 0 || !writes(p.waiting[0])) {
		p.fail("%q may enter and waits", p.waiting[0])
	}
	st := p.s.look()
	live := func(ends map[string]int64, ids []string) []string {
		return slices.DeleteFunc(ids, func(id string) bool { return ends[id] <= st.clock })
	}
	var held []string
	kept, cooling := protocol.ParseCooldown(st.value)
	switch {
	case st.value == protocol.MarkerValue:
		held = live(st.readers, slices.Sorted(maps.Keys(st.readers)))
	case st.value != "" && !cooling:
		held = []string{st.value}
	}
	if !slices.Equal(owners, held) {
		p.fail("%q believe to own, and %q do", owners, held)
	}
	if who, err := protocol.ParseID(p.cooling); cooling != (p.cooling != "") || cooling && (err != nil || who != kept) {
		p.fail("the lock is kept for %q", p.cooling)
	}
	if !slices.Equal(live(st.waiters, st.queue), p.waiting) {
		p.fail("%q believe to wait", p.waiting)
	}
}
