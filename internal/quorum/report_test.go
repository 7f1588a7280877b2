package quorum

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// shown is what a server reports about a lock.
func shown(value string, token uint64, left time.Duration) protocol.Snapshot {
	meta := ""
	if token > 0 {
		meta = fmt.Sprintf("%s%d:%d", protocol.FormatTag, token, token)
	}
	return protocol.Snapshot{Value: value, Meta: meta, Left: left}
}

func TestWhatServersShowIsMerged(t *testing.T) {
	a, b := protocol.NewClientID("a"), protocol.NewClientID("b")
	if b < a {
		a, b = b, a
	}
	of := func(client string) string {
		return protocol.NewRequest(client, protocol.Exclusive, time.Minute, false, protocol.Counted, protocol.Origin{}).ID
	}
	heldFor := func(id string, ms int) string { return fmt.Sprintf("%scooldown:%d:%s", protocol.FormatTag, ms, id) }
	kept := func(client string, ms int) string { return heldFor(of(client), ms) }
	x, y := of(a), of(b) // a request's id is the same on all servers that it has asked once
	for name, c := range map[string]struct {
		seen        []protocol.Snapshot
		owner       string
		behind      int
		token, last uint64
		left        time.Duration
	}{
		"all name one owner, whose token is among the greatest three": {
			[]protocol.Snapshot{shown(x, 14, 4), shown(x, 12, 5), shown(x, 11, 1), shown(x, 15, 2), shown(x, 13, 3)}, a, 5, 13, 15, 3},
		"a majority does, and others can have been in the first one": {
			[]protocol.Snapshot{shown(x, 12, 1), shown("", 99, 0), shown(x, 11, 2), shown(x, 13, 3), shown("", 10, 0)}, a, 3, 11, 99, 1},
		"one has lost the last token": {
			[]protocol.Snapshot{shown(x, 0, 1), shown(x, 12, 1), shown(x, 13, 1), shown(x, 14, 1)}, a, 4, 12, 14, 1},
		"one has granted the lease anew": {
			[]protocol.Snapshot{shown(x, 14, 1), shown(of(a), 80, 2), shown(x, 12, 3), shown(x, 11, 4), shown(x, 13, 5)}, a, 5, 12, 80, 3},
		"two have": {
			[]protocol.Snapshot{shown(x, 13, 1), shown(of(a), 80, 2), shown(x, 12, 3), shown(of(a), 70, 4), shown(x, 11, 5)}, a, 5, 11, 80, 3},
		"all but one have": {
			[]protocol.Snapshot{shown(of(a), 70, 1), shown(of(a), 80, 2), shown(x, 12, 3), shown(of(a), 60, 4)}, a, 4, 12, 80, 2},
		"all have": {
			[]protocol.Snapshot{shown(of(a), 70, 1), shown(of(a), 80, 2), shown(of(a), 60, 3)}, a, 3, 60, 80, 1},
		"one has not heard that an earlier lease of the owner has ended": {
			[]protocol.Snapshot{shown(of(a), 3, 1), shown(x, 12, 2), shown(x, 11, 3), shown(x, 13, 4)}, a, 4, 11, 13, 2},
		"two owners": {
			[]protocol.Snapshot{shown(y, 12, 1), shown(x, 11, 2), shown(x, 13, 3), shown(y, 20, 4), shown(x, 10, 5)}, a, 3, 10, 20, 2},
		"as many name a reader's lock": {
			[]protocol.Snapshot{shown(x, 11, 1), shown(protocol.MarkerValue, 12, 2)}, a, 1, 11, 12, 1},
		"as many name another program": {
			[]protocol.Snapshot{shown(x, 11, 1), shown("foreign", 0, 2)}, a, 1, 11, 11, 1},
		"readers and another program": {
			[]protocol.Snapshot{shown(protocol.MarkerValue, 11, 1), shown("foreign", 0, 2)}, protocol.MarkerValue, 1, 11, 11, 1},
		"as many name another writer": {
			[]protocol.Snapshot{shown(x, 11, 1), shown(y, 12, 2)}, a, 1, 11, 12, 1},
		"as many name nobody": {
			[]protocol.Snapshot{shown("foreign", 0, 2), shown("", 11, 0)}, "foreign", 1, 0, 11, 2},
		"free": {
			[]protocol.Snapshot{shown("", 12, 0), shown(x, 11, 2), shown("", 13, 0), shown("", 0, 0), shown(y, 10, 5)}, "", 0, 12, 13, 0},
		"kept by a minimum hold, until another time on each": {
			[]protocol.Snapshot{shown(kept(a, 1), 12, 1), shown(kept(a, 2), 11, 2), shown(kept(a, 3), 13, 3)}, a, 3, 11, 13, 1},
		"kept by a minimum hold, and one server shows an earlier lease of the owner": {
			[]protocol.Snapshot{shown(of(a), 3, 1), shown(heldFor(x, 1), 11, 1), shown(heldFor(x, 2), 13, 3), shown(heldFor(x, 3), 12, 4)}, a, 4, 11, 13, 1},
		"foreign": {
			[]protocol.Snapshot{shown("mine", 0, 1), shown("yours", 0, 2), shown("mine", 0, 3)}, "mine", 2, 0, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // in both orders
				got := Merged(slices.Clone(c.seen), 5)
				if OwnerOf(&got) != c.owner || got.Behind != c.behind || got.Servers != 5 || got.Answered != len(c.seen) ||
					protocol.LastToken(got.Meta) != c.token || got.Last != c.last || got.Left != c.left {
					t.Errorf("%q of %d of %d, token %d of %d, left %d: want %+v", OwnerOf(&got), got.Behind, got.Answered, protocol.LastToken(got.Meta), got.Last, got.Left, c)
				}
				slices.Reverse(c.seen)
			}
		})
	}
}

func TestTheQueueOfAQuorumIsTheMedian(t *testing.T) {
	for want, lengths := range map[int][]int{4: {4}, 3: {2, 3}, 7: {0, 216, 7}, 5: {6, 216, 5, 0, 4}} {
		var seen []protocol.Snapshot
		for _, n := range lengths {
			seen = append(seen, protocol.Snapshot{Length: n, Queue: make([]string, n)})
		}
		if got := Merged(seen, 5); got.Length != want || len(got.Queue) != want {
			t.Errorf("of %v: %d, with %d of them named; want %d", lengths, got.Length, len(got.Queue), want)
		}
	}
}

// The servers admit readers one after another, and each server has its own clock.
func TestReadersAreThoseOfWhichAMajorityCanKnow(t *testing.T) {
	a, b := protocol.NewClientID("a"), protocol.NewClientID("b")
	shares := func(now uint64, left int, clients ...string) protocol.Snapshot {
		sn := protocol.Snapshot{Value: protocol.MarkerValue, Clock: now * 1000}
		for _, client := range clients {
			id := protocol.NewRequest(client, protocol.Shared, time.Minute, false, protocol.Counted, protocol.Origin{}).ID
			sn.Readers = append(sn.Readers, id, strconv.Itoa(int(now)+left))
		}
		return sn
	}
	for name, c := range map[string]struct {
		seen []protocol.Snapshot
		want string
	}{
		"one has joined on three": {[]protocol.Snapshot{shares(1000, 10, a), shares(2000, 20, a, b), shares(3000, 30, a, b), shares(4000, 40, a), shares(5000, 50, b)}, "b 20, a 20"},
		"one asks two":            {[]protocol.Snapshot{shares(1000, 10, a), shares(2000, 20, a, b), shares(3000, 30, a, b), shares(4000, 40, a), shares(5000, 50, a)}, "a 30"},
		"one has two on a server": {[]protocol.Snapshot{shares(1000, 10, a, b, b), shares(2000, 20, a, b), shares(3000, 30, a), shares(4000, 40), shares(5000, 50)}, "a 10"},
		"two are silent":          {[]protocol.Snapshot{shares(1000, 10, a), shares(2000, 20, a, b), shares(3000, 30, a)}, "b 20, a 30"},
		"foreign":                 {[]protocol.Snapshot{{Value: protocol.MarkerValue, Readers: []string{"x", "inf"}}, {Value: protocol.MarkerValue, Readers: []string{"x", "-inf"}}, {Value: protocol.MarkerValue}}, "x +Inf"},
		"half a pair":             {[]protocol.Snapshot{{Value: protocol.MarkerValue, Readers: []string{"x", "5", "y"}}, {Value: protocol.MarkerValue, Readers: []string{"x", "6"}}, {Value: protocol.MarkerValue}}, "x 6"},
	} {
		got := Merged(c.seen, 5)
		var readers []string
		for named := range slices.Chunk(got.Readers, 2) {
			ends, err := strconv.ParseFloat(named[1], 64)
			who := named[0]
			if id, err := protocol.ParseID(who); err == nil {
				who = id.Label
			}
			if readers = append(readers, fmt.Sprintf("%s %v", who, ends-float64(got.Clock/1000))); err != nil {
				t.Error(err)
			}
		}
		slices.Sort(readers)
		want := strings.Split(c.want, ", ")
		slices.Sort(want)
		if !slices.Equal(readers, want) {
			t.Errorf("%s: %q, want %q", name, readers, want)
		}
	}
}

func TestServersThatHaveTheGrantAndAnswerStandBehindIt(t *testing.T) {
	now := time.Now()
	away := -1
	l := NewLock(&Config{N: 5, Away: func(i int) bool { return i == away }}, &protocol.Keys{Lock: "x"})
	aged := func(s partState, age time.Duration) part { return part{state: s, proved: now.Add(-age)} }
	r := &request{id: "x", token: 1, unbroken: true, who: protocol.Identity{TTL: time.Minute},
		parts: []part{aged(owned, 0), aged(owned, 59*time.Second), aged(owned, time.Minute), aged(asked, 0), aged(queued, 0)}}
	l.reqs["x"] = r
	behind := func(want int, why string) {
		t.Helper()
		if n := l.behind("x", now); n != want {
			t.Errorf("%s: %d, want %d", why, n, want)
		}
	}
	behind(2, "two have it, and it has expired on a third")
	away = 1
	behind(1, "one of them does not answer")
	away = -1
	r.unbroken, r.parts[0].countsFrom = false, now.Add(time.Second)
	behind(1, "one of them is in quarantine")
	r.token = 0
	behind(0, "it is not granted yet")
	if n := l.behind("y", now); n != 0 {
		t.Errorf("another request: %d", n)
	}
}

// An answer says for how long the server's quarantine lasts from when it was sent, and may be late.
func TestALateAnswerIsNoSecondLossOfData(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reports := 0
		s := &Server{quarantine: time.Minute, reports: Reports{Young: func(int, time.Duration, bool, bool) { reports++ }}}
		m := &member{quorum: s}
		s.members = []*member{m}
		for _, c := range []struct{ after, left time.Duration }{
			{0, time.Minute},
			{2 * time.Second, time.Minute}, // this answer was sent with the first one
			{10 * time.Second, 49 * time.Second},
		} {
			time.Sleep(c.after)
			if m.reportYoung(c.left); reports != 1 {
				t.Errorf("%v later: %d reports", c.after, reports)
			}
		}
		time.Sleep(4 * time.Second)
		if m.reportYoung(time.Minute); reports != 2 {
			t.Errorf("after another restart: %d reports", reports)
		}
	})
}

func TestAServerThatLosesItsDataAgainSoonIsReportedAsSuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []bool
		s := &Server{reports: Reports{Young: func(_ int, _ time.Duration, _, again bool) { told = append(told, again) }}}
		m := &member{quorum: s}
		s.members = []*member{m}
		for _, c := range []struct {
			after, quarantine time.Duration
			again             bool
		}{
			{0, time.Minute, false},
			{30 * time.Second, time.Minute, true}, // in quarantine
			{9 * time.Minute, time.Minute, true},
			{11 * time.Minute, time.Minute, false},
			{time.Hour, time.Hour, false},
			{50 * time.Minute, time.Hour, true}, // in quarantine
		} {
			time.Sleep(c.after)
			s.quarantine = c.quarantine
			m.reportYoung(c.quarantine)
			if last := len(told) - 1; last < 0 || told[last] != c.again {
				t.Errorf("%v after the one before: again is %v", c.after, told)
			}
		}
		if len(told) != 6 {
			t.Errorf("%d reports", len(told))
		}
	})
}
