package redisserver

import (
	"context"
	"fmt"
	"math/rand"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// step is one call of a script, which can be repeated and sent to several servers.
type step struct {
	what string // acquire, try, question, release, yield, downgrade, cancel, renew, evict, adopt
	id   string
	next string        // yield, downgrade
	used uint64        // release, yield, downgrade, cancel: the last token minus the server's, 0 for none
	cool time.Duration // release, yield, cancel: the cool-down

	ticket uint64 // on a server of a quorum: acquire, try, question, yield, downgrade
}

// result is the result of a step. The texts of errors are not compared, because those of the
// embedded server differ.
type result struct {
	protocol.Answer
	evicted []string
	failed  bool
	err     error
}

// first picks half of all ids. An acquire of one says that it is the first: where that is not
// true, it is a late copy.
func first(id string) bool {
	sum := 0
	for _, b := range []byte(id) {
		sum += int(b)
	}
	return sum%2 == 0
}

func (s *scene) take(st step) (r result) {
	s.t.Helper()
	var last uint64
	if st.used > 0 {
		last = s.look().token() + st.used
	}
	switch st.what {
	case "acquire":
		c := s.acquireOf(st.id)
		c.Ticket = st.ticket
		c.First = first(st.id)
		r.Answer, r.err = s.do(c)
	case "try":
		c := s.acquireOf(st.id)
		c.Wait, c.Ticket = false, st.ticket
		r.Answer, r.err = s.do(c)
	case "question":
		c := s.questionOf(st.id)
		c.Ticket = st.ticket
		r.Answer, r.err = s.do(c)
	case "release":
		r.Answer, r.err = s.do(protocol.Command{Verb: protocol.Release, ID: st.id, Last: last, Cooldown: st.cool})
	case "yield":
		r.Answer, r.err = s.do(protocol.Command{Verb: protocol.Yield, ID: st.id, Next: st.next, Last: last, Cooldown: st.cool, Ticket: st.ticket})
	case "downgrade":
		r.Answer, r.err = s.do(protocol.Command{Verb: protocol.Downgrade, ID: st.id, Next: st.next, Last: last, Ticket: st.ticket})
	case "cancel":
		r.err = s.tryCancel(st.id, last, st.cool)
	case "renew":
		batch := s.renewal(st.id)
		r.Outcome, r.Clock, r.err = batch.Outcome, batch.Clock, batch.Err
	case "evict":
		r.evicted, r.err = s.srv.EvictOwner(context.Background(), &s.keys, last, "")
	case "adopt":
		r.Answer, r.err = s.srv.Adopt(context.Background(), &s.keys, st.id, last)
	}
	r.failed = r.err != nil
	return r
}

// meaning describes what must be equal wherever the same step is taken, with tokens by their
// names. Of the remaining time it says only whether there is one.
func (r *result) meaning(names *ranks) string {
	if r.failed {
		return "failed"
	}
	timed := r.Left
	if timed > 0 {
		timed = 1
	}
	blocker := r.Blocker
	if strings.HasPrefix(blocker, "leased1:r") {
		blocker = "a reader" // the one that ends last, which differs if two end in the same ms
	}
	slices.Sort(r.evicted) // their order differs if two end in the same ms
	return fmt.Sprint(r.Outcome, " token ", names.name(r.Token), " by the clock ", r.Token == r.Clock && r.Token > 0, " more ", r.More,
		" place ", r.Place, " left ", timed, " blocker ", blocker, " no notify ", r.NoNotify, " echo ", r.Echo, " handed ", r.Handed, " evicted ", r.evicted)
}

// scattering is a random state of a lock that a seed determines: any mixture of what its keys
// can hold, live and dead, of this version and foreign. ids are the ids of this version in
// it, and some others. The state is the same on every server.
type scattering struct {
	ids      []string
	commands [][]any // with the index of a key as second
	seed     int64
}

var scatterTTLs = []time.Duration{100 * time.Second, 300 * time.Second, time.Hour}

func scatter(seed, now int64) *scattering {
	x := &scattering{seed: seed}
	rng := rand.New(rand.NewSource(seed))
	put := func(command string, key int, args ...any) {
		x.commands = append(x.commands, append([]any{command, key}, args...))
	}
	var maker scene
	id := func(modes string) string {
		m := protocol.Mode(modes[rng.Intn(len(modes))])
		id := maker.id(string("ABC"[rng.Intn(3)]), m, scatterTTLs[rng.Intn(len(scatterTTLs))])
		id = proved(rng, id)
		x.ids = append(x.ids, id)
		return id
	}
	// member returns anything that the queue or the set of readers can contain.
	member := func(modes string) string {
		switch rng.Intn(10) {
		case 0:
			return "garbage" + strconv.Itoa(rng.Intn(100))
		case 1:
			return "leased2:" + strconv.Itoa(rng.Intn(100))
		}
		return id(modes)
	}
	// ends returns when a lease ends: in the past, within its TTL, or beyond it.
	ends := func() int64 {
		return now + []int64{-60_000, -60_000, 80_000, 90_000, 95_000, 95_000, 7_200_000}[rng.Intn(7)]
	}
	switch rng.Intn(8) {
	case 0, 1:
		put("SET", 0, id("w"), "PX", []int{80_000, 7_200_000}[rng.Intn(2)])
	case 2:
		put("SET", 0, []string{"foreign", "leased2:w:1", "leased1:cooldown:90000:" + id("w")}[rng.Intn(3)], "PX", []int{80_000, 7_200_000}[rng.Intn(2)])
	case 3, 4, 5:
		for range 1 + rng.Intn(3) {
			put("ZADD", 2, ends(), member("rrrrrrw"))
		}
		put("PEXPIRE", 2, 7_200_000)
		if rng.Intn(4) > 0 {
			put("SET", 0, protocol.MarkerValue, "PX", 7_200_000)
		}
	}
	for range rng.Intn(5) {
		entry := member("rw")
		put("ZADD", 1, len(x.commands), entry)
		if rng.Intn(5) > 0 {
			put("ZADD", 3, ends(), entry)
		}
	}
	put("PEXPIRE", 1, 900_000)
	put("PEXPIRE", 3, 900_000)
	if last := now * 1000; rng.Intn(4) > 0 {
		meta := []string{
			fmt.Sprintf("leased1:%d:%d", last-5_000_000, last-5_000_000), fmt.Sprintf("leased1:%d:%d", last-5_000_000, last),
			fmt.Sprintf("leased1:%d:%d", last+3_600_000_000, last), "leased1:7:7", "leased1:nonsense", "garbage",
			fmt.Sprintf("leased2:%d:%d", last-5_000_000, last),
		}[rng.Intn(7)]
		put("SET", 4, meta, "PX", 900_000)
	}
	id("w")
	id("r")
	return x
}

// only removes everything that is not in these keys.
func (x *scattering) only(keys ...int) {
	x.commands = slices.DeleteFunc(x.commands, func(c []any) bool { return !slices.Contains(keys, c[1].(int)) })
}

// contested keeps the last token, and makes a writer own before a queue of this version's
// ids.
func (x *scattering) contested(rng *rand.Rand, now int64) {
	x.only(4)
	if last := now*1000 - 5_000_000; rng.Intn(3) > 0 {
		x.commands = [][]any{{"SET", 4, fmt.Sprintf("leased1:%d:%d", last, last), "PX", 900_000}}
	}
	maker := scene{made: 500_000}
	id := func(m protocol.Mode) string {
		id := maker.id(string("ABC"[rng.Intn(3)]), m, scatterTTLs[rng.Intn(len(scatterTTLs))])
		id = proved(rng, id)
		return id
	}
	x.ids = []string{id(protocol.Exclusive)}
	x.commands = append(x.commands, []any{"SET", 0, x.ids[0], "PX", 80_000})
	for range 1 + rng.Intn(3) {
		waiter := id(protocol.Mode("wwwr"[rng.Intn(4)]))
		x.commands = append(x.commands, []any{"ZADD", 1, len(x.commands), waiter}, []any{"ZADD", 3, now + 90_000, waiter})
	}
	x.commands = append(x.commands, []any{"PEXPIRE", 1, 900_000}, []any{"PEXPIRE", 3, 900_000})
}

// joined is contested, with one TTL for nearly all requests. The head of the queue has asked lately or
// not, with waiting leases to match, and the queue's keys expire late enough or not. x.ids[1] waits for
// the first time, or has a place already. The ids after it are in the queue; if nobody is, another id
// follows that is not.
func (x *scattering) joined(rng *rand.Rand, now int64) {
	x.contested(rng, now)
	x.only(4)
	ttl := scatterTTLs[rng.Intn(len(scatterTTLs))]
	maker := scene{made: 600_000}
	id := func(modes string) string {
		of := ttl
		if rng.Intn(12) == 0 {
			of = scatterTTLs[rng.Intn(len(scatterTTLs))]
		}
		return proved(rng, maker.id(string("ABC"[rng.Intn(3)]), protocol.Mode(modes[rng.Intn(len(modes))]), of))
	}
	x.ids = []string{id("w"), id("wwwwwwr")}
	if !first(x.ids[1]) {
		x.ids[1] = id("wwwwwwr")
	}
	left := ttl.Milliseconds() - []int64{0, 1_000, 2_000, 3_000, 7_000, ttl.Milliseconds() - 1_000, -3_000}[rng.Intn(7)]
	x.commands = append(x.commands, []any{"SET", 0, x.ids[0], "PX", []int64{left, ttl.Milliseconds() + 60_000}[rng.Intn(8)/7]})
	for i := range min(3, rng.Intn(8)) {
		waiter := id("wwwwwwr")
		x.ids = append(x.ids, waiter)
		x.commands = append(x.commands, []any{"ZADD", 1, i, waiter}, []any{"ZADD", 3, now + left, waiter})
		if rng.Intn(12) == 0 {
			x.ids[1] = waiter
		}
	}
	if len(x.ids) == 2 {
		x.ids = append(x.ids, id("w"))
	}
	lasts := []int64{3, 2, 2, 1}[rng.Intn(4)]*ttl.Milliseconds() + 500
	x.commands = append(x.commands, []any{"PEXPIRE", 1, lasts}, []any{"PEXPIRE", 3, lasts})
}

// put sets the lock to the state x.
func (s *scene) put(x *scattering) {
	s.t.Helper()
	s.clear()
	all := s.keys.All()
	for _, c := range x.commands {
		args := append([]any{c[0], all[c[1].(int)]}, c[2:]...)
		s.raw(args...)
	}
}

// step chooses a step to take in the state.
func (x *scattering) step(rng *rand.Rand) step {
	var maker scene
	maker.made = 1_000_000 + rng.Intn(1_000_000)
	what, id, next := []string{"acquire", "acquire", "try", "question", "release", "yield", "cancel", "renew", "downgrade"}[rng.Intn(9)], x.ids[rng.Intn(len(x.ids))], protocol.Mode("wr"[rng.Intn(2)])
	if what == "downgrade" {
		id, next = x.ids[0], protocol.Shared
		if !strings.HasPrefix(id, "leased1:w") { // only a writer can be downgraded
			what = "release"
		}
	}
	return step{
		what: what,
		id:   id,
		next: maker.id("A", next, scatterTTLs[rng.Intn(3)]),
		used: []uint64{0, 0, 1, 7_200_000_000}[rng.Intn(4)],
		cool: someCooldown(rng),
	}
}

// someCooldown returns a cool-down that does not end during a test, or none.
func someCooldown(rng *rand.Rand) time.Duration {
	return []time.Duration{0, 0, 80 * time.Second, time.Hour}[rng.Intn(4)]
}
