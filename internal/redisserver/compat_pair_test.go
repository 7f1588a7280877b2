package redisserver

import (
	"fmt"
	"maps"
	"math/rand"
	"slices"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/protocol"
)

// pair is two clients of one lock, each with a few requests, and what they know from answers and
// messages. Both have an inbox, and nothing expires.
type pair struct {
	t       *testing.T
	s       *scene
	callers map[string]*speaker
	inbox   map[string]*listener

	rng        *rand.Rand
	owns       map[string]uint64 // id → token, as its client knows it
	waiting    []string          // in the order of their answers
	ended      []string          // to send late copies of their commands
	downgrades []step            // all that were sent, also for late copies
	top        uint64            // greatest token so far
	log        []string
}

func client(id string) string { return id[len(id)-1:] }

func (p *pair) fail(format string, args ...any) {
	p.t.Helper()
	p.t.Fatalf("%s\n%s\n%s", strings.Join(p.log, "\n"), fmt.Sprintf(format, args...), p.s.look().shape(&ranks{}))
}

func (p *pair) run(seed int64) {
	p.rng = rand.New(rand.NewSource(seed))
	p.owns, p.waiting, p.ended, p.downgrades = map[string]uint64{}, nil, nil, nil
	p.top, p.log = 0, []string{fmt.Sprint("seed ", seed)}
	p.s.clear()
	for range 40 {
		p.act()
		p.check()
	}
	for range 40 { // releases only: all waiters must be served
		if len(p.owns) == 0 {
			break
		}
		p.take(step{what: "release", id: p.owner()})
		p.check()
	}
	if len(p.owns)+len(p.waiting) > 0 {
		p.fail("%v own and %v wait forever", p.owns, p.waiting)
	}
}

func (p *pair) owners() []string { return slices.Sorted(maps.Keys(p.owns)) }

// owner returns one of the owners, or "".
func (p *pair) owner() string {
	all := p.owners()
	if len(all) == 0 {
		return ""
	}
	return all[p.rng.Intn(len(all))]
}

func (p *pair) act() {
	fresh := p.s.id(string("AB"[p.rng.Intn(2)]), protocol.Mode("wr"[p.rng.Intn(2)]), long)
	if p.rng.Intn(2) == 0 {
		fresh = counted(fresh)
	}
	owner := p.owner()
	switch n := p.rng.Intn(16); {
	case n < 3 && len(p.waiting) < 6:
		p.take(step{what: []string{"acquire", "newcomer"}[p.rng.Intn(2)], id: fresh})
	case n == 3:
		p.take(step{what: "try", id: fresh})
	case n < 6 && owner != "":
		p.take(step{what: "release", id: owner, used: p.ahead()})
	case n == 6 && owner != "":
		next := p.s.id(client(owner), protocol.Mode("wr"[p.rng.Intn(2)]), long)
		p.take(step{what: "yield", id: owner, next: next, used: p.ahead()})
	case n == 7 && owner != "":
		p.take(step{what: []string{"renew", "acquire", "question"}[p.rng.Intn(3)], id: owner})
	case n == 8 && len(p.waiting) > 0:
		p.take(step{what: []string{"cancel", "acquire"}[p.rng.Intn(2)], id: p.waiting[p.rng.Intn(len(p.waiting))]})
	case n == 9 && len(p.ended) > 0: // late copies of a release do nothing
		id := p.ended[p.rng.Intn(len(p.ended))]
		p.take(step{what: []string{"release", "cancel", "renew"}[p.rng.Intn(3)], id: id})
	case n == 10 && len(p.ended) > 0:
		id := p.ended[p.rng.Intn(len(p.ended))]
		next := p.s.id(client(id), protocol.Exclusive, long)
		p.take(step{what: "yield", id: id, next: next})
	case (n == 11 || n == 12) && writes(owner):
		st := step{what: "downgrade", id: owner, next: p.s.id(client(owner), protocol.Shared, long), used: p.ahead()}
		p.downgrades = append(p.downgrades, st)
		p.take(st)
	case n == 13 && len(p.downgrades) > 0:
		p.take(p.downgrades[p.rng.Intn(len(p.downgrades))])
	case n == 14 && p.rng.Intn(2) == 0:
		p.evict(string("AB"[p.rng.Intn(2)]))
	}
}

// ahead returns by how much the last token that an owner assigned locally exceeds the token of its
// grant. An hour's worth is more than the server's clock can catch up with during the test.
func (p *pair) ahead() uint64 { return []uint64{0, 0, 5, 3_600_000_000}[p.rng.Intn(4)] }

func writes(id string) bool { return strings.HasPrefix(id, "leased1:w") }

func (p *pair) take(st step) {
	token, owned := p.owns[st.id]
	last := uint64(0)
	if st.used > 0 {
		last = token + st.used // tokens assigned locally
	}
	o, answer := p.callers[client(st.id)].take(st, last)
	p.log = append(p.log, fmt.Sprintf("%+v last %d: %d, token %d", st, last, o, answer))
	p.top = max(p.top, last)

	asked := st.id
	switch st.what {
	case "release", "cancel", "yield":
		if owned && o == protocol.NotOurs || !owned && st.what != "cancel" && o != protocol.NotOurs {
			p.fail("%+v: owned %v, answered %d", st, owned, o)
		}
		p.ends(st.id)
		asked = st.next
	case "downgrade":
		_, again := p.owns[st.next]
		if (owned || again) != (o == protocol.Granted) {
			p.fail("%+v: owned %v, its next %v, answered %d", st, owned, again, o)
		}
		p.ends(st.id)
		asked = st.next
	case "renew":
		if owned != (o == protocol.Granted) {
			p.fail("%+v: owned %v, answered %d", st, owned, o)
		}
		return
	}
	handed, _ := p.told() // grants that were published before the answer was sent
	if asked != "" && o == protocol.Granted {
		if again, ok := p.owns[asked]; ok && !handed[asked] {
			answer = max(answer, again) // it owned already
		} else {
			handed[asked] = true
		}
		p.owns[asked] = answer
	}
	if asked != "" && o == protocol.Enqueued && !slices.Contains(p.waiting, asked) {
		p.waiting = append(p.waiting, asked)
	}
	if st.what == "downgrade" && handed[asked] { // it owns before the readers in the queue do
		delete(handed, asked)
		p.grew(asked)
	}
	p.served(handed, asked)
}

// told reads both inboxes and returns which ids were granted, and which were evicted with
// which token.
func (p *pair) told() (handed map[string]bool, revoked map[string]uint64) {
	handed, revoked = map[string]bool{}, map[string]uint64{}
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
			case protocol.MessageRevoked:
				revoked[m.ID] = m.Token
			}
		}
	}
	return handed, revoked
}

// evict evicts the owners. It checks that each is notified, whatever its version, with a token that
// is not below its own, and that those who may enter next are granted the lock.
func (p *pair) evict(by string) {
	owners := p.owners()
	evicted := p.callers[by].evict()
	p.log = append(p.log, fmt.Sprintf("evict by %s: %q", by, evicted))
	handed, revoked := p.told()
	slices.Sort(evicted)
	if !slices.Equal(evicted, owners) || len(revoked) != len(owners) {
		p.fail("evicted %q, told %v, owners %q", evicted, revoked, owners)
	}
	for _, id := range owners {
		if token, ok := revoked[id]; !ok || token < p.owns[id] {
			p.fail("%s has token %d, and was told of %d", id, p.owns[id], token)
		}
		p.ends(id)
	}
	p.served(handed, "")
}

func (p *pair) ends(id string) {
	delete(p.owns, id)
	p.waiting = slices.DeleteFunc(p.waiting, func(w string) bool { return w == id })
	p.ended = append(p.ended, id)
}

// served checks the order and the tokens of the ids that were just made owner. asked can
// have been granted at once, if the queue was empty or only readers were ahead of it.
func (p *pair) served(handed map[string]bool, asked string) {
	for len(p.waiting) > 0 && handed[p.waiting[0]] {
		delete(handed, p.waiting[0])
		p.grew(p.waiting[0])
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
	}
	if writers > 1 || writers == 1 && len(owners) > 1 {
		p.fail("%q own at once", owners)
	}
	if len(p.waiting) > 0 && writers == 0 && (len(owners) == 0 || !writes(p.waiting[0])) {
		p.fail("%q may enter and waits", p.waiting[0])
	}
	st := p.s.look()
	var held []string
	switch {
	case st.value == protocol.MarkerValue:
		held = byEnd(st.readers, st.clock)
	case st.value != "":
		held = []string{st.value}
	}
	if !slices.Equal(owners, held) {
		p.fail("%q believe to own, and %q do", owners, held)
	}
	if !slices.Equal(st.queue, p.waiting) {
		p.fail("%q believe to wait", p.waiting)
	}
}
