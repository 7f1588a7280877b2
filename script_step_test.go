package leased

import (
	"context"
	"fmt"
	"math/rand"
	"slices"
	"strconv"
	"strings"
	"time"
)

// step is one call of a script, that can be repeated and sent to several servers.
type step struct {
	what string // acquire, try, release, yield, downgrade, cancel, renew, evict
	id   string
	next string // yield, downgrade
	used uint64 // release, yield, downgrade, cancel: last token is the server's and so much more, 0 for none
}

// result is what came of a step. Errors are told by their presence alone: the
// embedded server words them differently.
type result struct {
	answer
	evicted []string
	failed  bool
	err     error
}

func (s *scene) take(st step) (r result) {
	s.t.Helper()
	var last uint64
	if st.used > 0 {
		last = s.look().token() + st.used
	}
	switch st.what {
	case "acquire":
		r.answer, r.err = s.do(s.acquireOf(st.id))
	case "try":
		c := s.acquireOf(st.id)
		c.wait = false
		r.answer, r.err = s.do(c)
	case "release":
		r.answer, r.err = s.do(command{verb: release, id: st.id, last: last})
	case "yield":
		r.answer, r.err = s.do(command{verb: yield, id: st.id, next: st.next, last: last})
	case "downgrade":
		r.answer, r.err = s.do(command{verb: downgrade, id: st.id, next: st.next, last: last})
	case "cancel":
		r.err = s.tryCancel(st.id, last)
	case "renew":
		batch := s.renewal(st.id)
		r.outcome, r.clock, r.err = batch.outcome, batch.clock, batch.err
	case "evict":
		r.evicted, r.err = s.srv.evict(context.Background(), &s.keys)
	}
	r.failed = r.err != nil
	return r
}

// meaning is what must be equal wherever the same step is taken; left is
// compared apart, and tokens go by their names.
func (r *result) meaning(names *ranks) string {
	if r.failed {
		return "failed"
	}
	timed := r.left
	if timed > 0 {
		timed = 1
	}
	blocker := r.blocker
	if strings.HasPrefix(blocker, "leased1:r") {
		blocker = "a reader" // the one that ends last: two may end in one ms, or not
	}
	slices.Sort(r.evicted) // in the order of their ends, which may be one ms, or not
	return fmt.Sprint(r.outcome, " token ", names.name(r.token), " by the clock ", r.token == r.clock && r.token > 0, " more ", r.more,
		" place ", r.place, " left ", timed, " blocker ", blocker, " mute ", r.mute, " echo ", r.echo, " handed ", r.handed, " evicted ", r.evicted)
}

// scattering is a state of a lock as a seed makes it: whatever can stand in its
// keys, live and dead, ours and not, in any mixture. ids are those of ours in it
// and some beside it. All of it is the same wherever it is put.
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
		m := mode(modes[rng.Intn(len(modes))])
		id := maker.id(string("ABC"[rng.Intn(3)]), m, scatterTTLs[rng.Intn(len(scatterTTLs))])
		if rng.Intn(2) == 0 {
			id = counted(id)
		}
		x.ids = append(x.ids, id)
		return id
	}
	// member is anything that may stand in the queue or among the readers.
	member := func(modes string) string {
		switch rng.Intn(10) {
		case 0:
			return "garbage" + strconv.Itoa(rng.Intn(100))
		case 1:
			return "leased2:" + strconv.Itoa(rng.Intn(100))
		}
		return id(modes)
	}
	// ends is when a lease may end: in the past, in time, or too late.
	ends := func() int64 {
		return now + []int64{-60_000, -60_000, 80_000, 90_000, 95_000, 95_000, 7_200_000}[rng.Intn(7)]
	}
	switch rng.Intn(8) {
	case 0, 1:
		put("SET", 0, id("w"), "PX", []int{80_000, 7_200_000}[rng.Intn(2)])
	case 2:
		put("SET", 0, []string{"foreign", "leased2:w:1"}[rng.Intn(2)], "PX", 80_000)
	case 3, 4, 5:
		for range 1 + rng.Intn(3) {
			put("ZADD", 2, ends(), member("rrrrrrw"))
		}
		put("PEXPIRE", 2, 7_200_000)
		if rng.Intn(4) > 0 {
			put("SET", 0, markerValue, "PX", 7_200_000)
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
			fmt.Sprintf("leased1:%d:%d", last+3_600_000_000, last), "leased1:7:7", "leased1:nonsense", "garbage", "leased2:1",
		}[rng.Intn(7)]
		put("SET", 4, meta, "PX", 900_000)
	}
	id("w")
	id("r")
	return x
}

// only leaves nothing but what is in these keys.
func (x *scattering) only(keys ...int) {
	x.commands = slices.DeleteFunc(x.commands, func(c []any) bool { return !slices.Contains(keys, c[1].(int)) })
}

// contested leaves the last token and puts a writer before a queue of ours.
func (x *scattering) contested(rng *rand.Rand, now int64) {
	x.only(4)
	if last := now*1000 - 5_000_000; rng.Intn(3) > 0 {
		x.commands = [][]any{{"SET", 4, fmt.Sprintf("leased1:%d:%d", last, last), "PX", 900_000}}
	}
	maker := scene{made: 500_000}
	id := func(m mode) string {
		id := maker.id(string("ABC"[rng.Intn(3)]), m, scatterTTLs[rng.Intn(len(scatterTTLs))])
		if rng.Intn(2) == 0 {
			id = counted(id)
		}
		return id
	}
	x.ids = []string{id(exclusive)}
	x.commands = append(x.commands, []any{"SET", 0, x.ids[0], "PX", 80_000})
	for range 1 + rng.Intn(3) {
		waiter := id(mode("wwwr"[rng.Intn(4)]))
		x.commands = append(x.commands, []any{"ZADD", 1, len(x.commands), waiter}, []any{"ZADD", 3, now + 90_000, waiter})
	}
	x.commands = append(x.commands, []any{"PEXPIRE", 1, 900_000}, []any{"PEXPIRE", 3, 900_000})
}

// put makes the scattered state the lock's.
func (s *scene) put(x *scattering) {
	s.t.Helper()
	s.clear()
	all := s.keys.all()
	for _, c := range x.commands {
		args := append([]any{c[0], all[c[1].(int)]}, c[2:]...)
		s.raw(args...)
	}
}

// step chooses what is done to the state.
func (x *scattering) step(rng *rand.Rand) step {
	var maker scene
	maker.made = 1_000_000 + rng.Intn(1_000_000)
	what, id, next := []string{"acquire", "acquire", "try", "release", "yield", "cancel", "renew", "downgrade"}[rng.Intn(8)], x.ids[rng.Intn(len(x.ids))], mode("wr"[rng.Intn(2)])
	if what == "downgrade" {
		id, next = x.ids[0], shared
		if !strings.HasPrefix(id, "leased1:w") { // nobody downgrades what is shared
			what = "release"
		}
	}
	return step{
		what: what,
		id:   id,
		next: maker.id("A", next, scatterTTLs[rng.Intn(3)]),
		used: []uint64{0, 0, 1, 7_200_000_000}[rng.Intn(4)],
	}
}
