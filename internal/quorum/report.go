package quorum

// What a quorum tells its users: how many servers stand behind a grant, what the servers together
// know of a lock, and when a server stops answering, answers again or is in quarantine.

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// Reports are called when a server's state changes, on a goroutine of the client and without any
// mutex held. Servers are numbered from 0.
type Reports struct {
	// Left reports that a server does not answer, and how many of the others do: when it stops, and again
	// every minute.
	Left func(server, answering int, why error)
	// Returned reports that a server answers again, and how long it was away.
	Returned func(server, answering int, after time.Duration)
	// Young reports that a server has no data from before, and for how long its vote does not count. If
	// tooFew, fewer than a majority of the servers may vote meanwhile. If again, its data had been lost a
	// short while before, too.
	Young func(server int, left time.Duration, tooFew, again bool)
	// Refused reports that a server answers, but refuses a command, each time.
	Refused func(server int, why error)
}

// Behind returns how many servers stand behind the grant of a request of the state machine, 0 if
// the request has no grant.
func (s *Server) Behind(k *protocol.Keys, id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.locks[k.Lock]; h != nil {
		return h.behind(id, time.Now())
	}
	return 0
}

// behind counts the servers that are known to still have the grant, and that answer. While a downgrade is
// not decided, a server has the writer's or the reader's.
func (l *Lock) behind(id string, now time.Time) int {
	r := l.reqs[id]
	if r == nil {
		return 0
	}
	other := cmp.Or(r.downgradesTo, r.downgradeOf)
	if r.token == 0 && (other == nil || other.token == 0) {
		return 0
	}
	stands := func(r *request, server int) bool {
		p := &r.parts[server]
		return r.counts(p, now) && lockstate.Elapsed(p.proved, now) < r.who.TTL && !l.cfg.Away(server)
	}
	n := 0
	for i := range r.parts {
		if stands(r, i) || other != nil && stands(other, i) {
			n++
		}
	}
	return n
}

// Blocked reports whether one owner is known to keep a request of the state machine from the lock on a
// majority of the servers. Where several each have a minority, none has the lock.
func (s *Server) Blocked(k *protocol.Keys, id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.locks[k.Lock]
	return h != nil && h.blocked(id)
}

func (l *Lock) blocked(id string) bool {
	r := l.reqs[id]
	if r == nil {
		return false
	}
	by := map[string]int{}
	for i := range r.parts {
		p := &r.parts[i]
		if p.state == owned || p.blocker == "" || l.cfg.Away(i) {
			continue
		}
		owner := p.blocker // readers, or another program
		if who, ok := protocol.OwnerOf(owner); ok {
			owner = who.Client
		}
		if by[owner]++; by[owner] >= l.cfg.need() {
			return true
		}
	}
	return false
}

// Answering returns how many of the servers are not known to be away.
func (s *Server) Answering() (answering, of int) {
	voting, young, _ := s.States()
	return voting + young, len(s.members)
}

// States returns how many of the servers may vote, are in quarantine, and are away, as far as is known.
func (s *Server) States() (voting, young, away int) {
	now := time.Now()
	for _, m := range s.members {
		switch {
		case m.isAway():
			away++
		case m.isYoung(now):
			young++
		default:
			voting++
		}
	}
	return voting, young, away
}

// tooFewVote reports whether fewer than a majority of the servers may vote. It does not count servers
// that may all be new: those vote together.
func (s *Server) tooFewVote() bool {
	voting, _, away := s.States()
	mayBeNew := away == 0 && !slices.ContainsFunc(s.members, (*member).isOld)
	return voting < s.cfg.need() && !mayBeNew
}

// OwnerOf returns what identifies the owner on all servers: its client, because the ids of one
// request differ between servers.
func OwnerOf(sn *protocol.Snapshot) string {
	if who, ok := protocol.OwnerOf(sn.Value); ok {
		return who.Client
	}
	return sn.Value
}

// GoesOn reports whether a writer of the client still keeps the lock from others under another value: it
// has become a reader, or has given the lock back with a cool-down.
func GoesOn(sn *protocol.Snapshot, client string) bool {
	if who, cools := protocol.ParseCooldown(sn.Value); cools {
		return who.Client == client
	}
	return sn.Value == protocol.MarkerValue && slices.ContainsFunc(sn.Readers, func(id string) bool {
		who, err := protocol.ParseID(id)
		return err == nil && who.Client == client && who.Origin.Token != 0
	})
}

// precedes reports whether x and not y is shown, of two owners that equally many servers name, whatever the order
// of their answers: a writer rather than readers, rather than a foreign owner, rather than nobody.
func precedes(x, y *protocol.Snapshot) bool {
	if d := cmp.Compare(precedence(x), precedence(y)); d != 0 {
		return d > 0
	}
	return OwnerOf(x) < OwnerOf(y)
}

func precedence(sn *protocol.Snapshot) int {
	_, ours := protocol.OwnerOf(sn.Value)
	switch {
	case ours:
		return 3
	case sn.Value == protocol.MarkerValue:
		return 2
	case sn.Value != "":
		return 1
	}
	return 0
}

// Merged combines the snapshots of those of n servers that answered into one. Its owner is the one
// that most of them name, see precedes, and the lease ends when fewer than a majority keep it. Its readers are
// those of which a majority can know, if the servers that did not answer do. Its queue is the median: one
// that has just come back has a shorter one, and one that refuses a part of what it is asked may have a longer.
func Merged(seen []protocol.Snapshot, n int) protocol.Snapshot {
	need := Majority(n)
	byOwner := map[string][]protocol.Snapshot{}
	var most []protocol.Snapshot
	for _, sn := range seen {
		who := OwnerOf(&sn)
		byOwner[who] = append(byOwner[who], sn)
		if all := byOwner[who]; len(all) > len(most) || len(all) == len(most) && precedes(&sn, &most[0]) {
			most = all
		}
	}
	slices.SortStableFunc(most, func(x, y protocol.Snapshot) int { return cmp.Compare(y.Left, x.Left) })
	sn := most[min(need, len(most))-1]
	sn.Meta = metaOf(most, n)
	sn.Readers = readersOf(most, sn.Clock, max(1, need-(n-len(seen))))
	sn.Servers, sn.Answered, sn.Behind = n, len(seen), len(most)
	if sn.Value == "" {
		sn.Behind = 0
	}
	for i := range seen {
		sn.Last = max(sn.Last, protocol.LastToken(seen[i].Meta))
	}
	byLength := slices.Clone(seen)
	slices.SortStableFunc(byLength, func(x, y protocol.Snapshot) int { return cmp.Compare(y.Length, x.Length) })
	median := byLength[(len(byLength)-1)/2]
	sn.Queue, sn.Length = median.Queue, median.Length
	return sn
}

// readersOf returns the readers that at least some of the snapshots name, as a server with that clock
// would. A lock may have a reader on more than a majority, and another one meanwhile on fewer. A reader is
// known by its client, as an owner is, and its lease ends when fewer than so many keep it.
func readersOf(most []protocol.Snapshot, clock uint64, some int) []string {
	type reader struct {
		id   string
		ends float64
	}
	byClient := map[string][]reader{}
	for i := range most {
		here := map[string]reader{} // one of each client, which may have asked again under another id
		for named := range slices.Chunk(most[i].Readers, 2) {
			if len(named) < 2 { // a proxy, or a server that is none, may answer anything
				continue
			}
			ends, _ := strconv.ParseFloat(named[1], 64)
			ends += float64(clock/1000) - float64(most[i].Clock/1000)
			client := OwnerOf(&protocol.Snapshot{Value: named[0]})
			if known, ok := here[client]; !ok || ends > known.ends {
				here[client] = reader{named[0], ends}
			}
		}
		for client, r := range here {
			byClient[client] = append(byClient[client], r)
		}
	}
	var readers []reader
	for _, named := range byClient {
		if len(named) >= some {
			slices.SortFunc(named, func(x, y reader) int { return cmp.Compare(y.ends, x.ends) })
			readers = append(readers, named[some-1])
		}
	}
	slices.SortFunc(readers, func(x, y reader) int {
		return cmp.Or(cmp.Compare(x.ends, y.ends), cmp.Compare(x.id, y.id))
	})
	var texts []string
	for _, r := range readers {
		texts = append(texts, r.id, strconv.FormatFloat(r.ends, 'f', -1, 64))
	}
	return texts
}

// metaOf returns the Meta of an owner, with a token that is not greater than its lease's. Each server gives
// a token of its own, and the lease's is the greatest that the owner had when a majority had granted it, in
// whatever order the servers answered. A server that grants the lease again, as after losing its data, gives
// a greater one, under another id of the owner. So if a majority of the servers have the owner under one id,
// at most a minority of them granted it only after that, and as many as the others have tokens up to the
// lease's. Otherwise only the smallest token counts, which is greater than the lease's only if no server that
// had granted the lease by then still has that grant.
func metaOf(most []protocol.Snapshot, n int) string {
	var all, same []string
	byID := map[string][]string{}
	for i := range most {
		sn := &most[i]
		if protocol.LastToken(sn.Meta) == 0 {
			continue
		}
		all = append(all, sn.Meta)
		id := protocol.OwnerID(sn.Value)
		byID[id] = append(byID[id], sn.Meta)
		if len(byID[id]) > len(same) {
			same = byID[id]
		}
	}
	if len(all) == 0 {
		return ""
	}
	first := len(same) - (n - Majority(n)) // how many of them were in the first majority, at least
	if first < 1 {
		same, first = all, 1
	}
	slices.SortFunc(same, func(x, y string) int { return cmp.Compare(protocol.LastToken(x), protocol.LastToken(y)) })
	return same[first-1]
}
