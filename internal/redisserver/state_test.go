package redisserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// state is everything that Redis holds about one lock. Times are in ms by the server's clock; an
// expiry is 0 for a missing key and -1 for a key that never expires.
type state struct {
	clock   int64
	value   string
	queue   []string
	readers map[string]int64
	waiters map[string]int64
	meta    string
	ends    [5]int64 // of lock, queue, readers, waiters, meta
}

// fuzz is by how many ms an expiry may be off. Redis returns remaining times in whole
// milliseconds, and a script that sets a key's expiry to such a time rounds once more. The
// embedded server counts a TTL down from one access to the next, and misses the time for which
// the machine suspends it in the middle of a command. Wrong TTLs, which the tests look for, are
// off by seconds.
const fuzz = 50

// look reads the state in one round trip, but without a transaction, which a full server refuses.
// Remaining times say when a key expires only if the server's clock hardly moved while they were
// read. How little it can move depends on the machine, so look allows more after many attempts.
func (s *scene) look() *state {
	s.t.Helper()
	for i := range 1000 {
		if st, moved := s.glance(); moved <= min(time.Millisecond<<(i/100), fuzz/2*time.Millisecond) {
			return st
		}
	}
	s.t.Fatal("the server's clock never stands still for a round trip")
	return nil
}

// glance reads the state once, and also returns by how much the server's clock moved
// meanwhile.
func (s *scene) glance() (st *state, moved time.Duration) {
	s.t.Helper()
	ctx := context.Background()
	var (
		now, then        *redis.TimeCmd
		value, meta      *redis.StringCmd
		queue            *redis.StringSliceCmd
		readers, waiters *redis.ZSliceCmd
		left             [5]*redis.Cmd // DurationCmd would not tell -1 from 0
	)
	_, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		now = p.Time(ctx)
		value = p.Get(ctx, s.keys.Lock)
		queue = p.ZRange(ctx, s.keys.Queue(), 0, -1)
		readers = p.ZRangeWithScores(ctx, s.keys.Readers(), 0, -1)
		waiters = p.ZRangeWithScores(ctx, s.keys.Waiters(), 0, -1)
		meta = p.Get(ctx, s.keys.Meta())
		for i, key := range s.keys.All() {
			left[i] = p.Do(ctx, "PTTL", key)
		}
		then = p.Time(ctx)
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		s.t.Fatal(err)
	}
	st = &state{
		clock: now.Val().UnixMilli(), value: value.Val(), meta: meta.Val(), queue: queue.Val(),
		readers: scores(readers.Val()), waiters: scores(waiters.Val()),
	}
	for i := range left {
		switch ms, _ := left[i].Int64(); ms {
		case -2:
		case -1:
			st.ends[i] = -1
		default:
			st.ends[i] = st.clock + ms
		}
	}
	return st, then.Val().Sub(now.Val())
}

func scores(zs []redis.Z) map[string]int64 {
	out := map[string]int64{}
	for _, z := range zs {
		out[fmt.Sprint(z.Member)] = int64(z.Score)
	}
	return out
}

// left returns how many ms remain until ends.
func (st *state) left(ends int64) int64 { return ends - st.clock }

// settled changes st's queue to what the next call will leave, and returns st: without dead
// entries at the head, and with the head's lease cut to the TTL in its id.
func (st *state) settled() *state {
	for len(st.queue) > 0 {
		id := st.queue[0]
		who, err := protocol.ParseID(id)
		if st.waiters[id] > st.clock && (err == nil || protocol.NewerFormat(id)) {
			if most := st.clock + who.TTL.Milliseconds(); err == nil && st.waiters[id] > most {
				st.waiters[id] = most
				st.ends[3] = max(st.ends[3], most)
			}
			break
		}
		st.queue = st.queue[1:]
		delete(st.waiters, id)
	}
	if len(st.queue) == 0 {
		st.ends[1] = 0
	}
	if len(st.waiters) == 0 {
		st.ends[3] = 0
	}
	return st
}

// token returns the lock's last token.
func (st *state) token() uint64 {
	rest, _ := strings.CutPrefix(st.meta, protocol.FormatTag)
	digits, _, _ := strings.Cut(rest, ":")
	n, _ := strconv.ParseUint(digits, 10, 64)
	return n
}

// ranks names tokens by the order in which they were seen, and by whether each was the
// greatest so far. Two servers that do the same with different clocks get equal names.
type ranks struct {
	names map[uint64]string
	top   uint64
}

func (r *ranks) name(token uint64) string {
	if token == 0 {
		return "none"
	}
	if r.names == nil {
		r.names = map[uint64]string{}
	}
	if _, ok := r.names[token]; !ok {
		order := map[int]string{-1: "below", 1: "above"}[cmp.Compare(token, r.top)]
		r.names[token] = fmt.Sprintf("#%d %s", len(r.names), order)
		r.top = max(r.top, token)
	}
	return r.names[token]
}

// shape describes the state without times, and with names in place of tokens. Two servers must
// agree on it exactly.
func (st *state) shape(r *ranks) string {
	kind := make([]string, 5)
	for i, ends := range st.ends {
		if kind[i] = "expires"; ends <= 0 {
			kind[i] = map[int64]string{0: "missing", -1: "forever"}[ends]
		}
	}
	meta := st.meta
	if strings.HasPrefix(meta, protocol.FormatTag) {
		meta = r.name(st.token())
	}
	return fmt.Sprintf("value %q\nqueue %q\nreaders %q\nwaiters %q\nmeta %q\nkeys %v",
		st.value, st.queue, byEnd(st.readers, st.clock), byEnd(st.waiters, st.clock), meta, kind)
}

// byEnd lists the ids in alphabetical order, and marks those whose lease has ended.
func byEnd(ends map[string]int64, now int64) []string {
	var out []string
	for _, id := range slices.Sorted(maps.Keys(ends)) {
		if ends[id] <= now {
			id += " (dead)"
		}
		out = append(out, id)
	}
	return out
}

// drift describes the first time that differs between two states of equal shape by more than
// slack ms, or returns "".
func (st *state) drift(other *state, slack int64) string {
	near := func(a, b int64) bool { return a-b <= slack && b-a <= slack }
	for i, what := range []string{"lock", "queue", "readers", "waiters", "meta"} {
		if !near(st.ends[i], other.ends[i]) {
			return fmt.Sprintf("%s expires at %d and %d", what, st.ends[i], other.ends[i])
		}
	}
	for id, ends := range st.readers {
		if !near(ends, other.readers[id]) {
			return fmt.Sprintf("reader %s ends at %d and %d", id, ends, other.readers[id])
		}
	}
	for id, ends := range st.waiters {
		if !near(ends, other.waiters[id]) {
			return fmt.Sprintf("waiter %s ends at %d and %d", id, ends, other.waiters[id])
		}
	}
	return ""
}
