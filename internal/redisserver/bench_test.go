package redisserver

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// BenchmarkScripts measures how much time single scripts cost the server, by the server's own
// statistics (INFO commandstats). It reports the mean of the cheaper half, because other programs on
// the machine can only add to the cost. ns/op includes the network.
func BenchmarkScripts(b *testing.B) {
	rdb := redistest.Server(b).Client()
	for _, waiting := range []int{0, 1000, 10_000} {
		s := benchScene(b, rdb)
		owner := s.writer("A")
		s.gets(s.acquire(owner))
		for range waiting {
			s.acquire(s.id("B", protocol.Exclusive, protocol.TokenLife(0)))
		}
		tail := s.id("C", protocol.Exclusive, protocol.TokenLife(0))
		s.acquire(tail)
		at := fmt.Sprint("waiting=", waiting)
		b.Run("op=recheck/"+at, func(b *testing.B) {
			s.cost(b, 100, nil, func() { s.acquire(tail) })
		})
		b.Run("op=brief recheck/"+at, func(b *testing.B) {
			c := s.briefly(tail, 1)
			s.cost(b, 100, nil, func() {
				if !s.must(s.do(c)).Brief {
					b.Fatal("not brief")
				}
				c.Waits, c.Until = c.Until, c.Until+1
			})
		})
		b.Run("op=enqueue/"+at, func(b *testing.B) {
			var id string
			s.cost(b, 1, func() { s.cancel(id, 0); id = s.id("C", protocol.Exclusive, protocol.TokenLife(0)) }, func() { s.acquire(id) })
			s.cancel(id, 0)
		})
		b.Run("op=cancel/"+at, func(b *testing.B) {
			var id string
			s.cost(b, 1, func() { id = s.id("C", protocol.Exclusive, protocol.TokenLife(0)); s.acquire(id) }, func() { s.cancel(id, 0) })
		})
		s.clear()
	}
	b.Run("op=acquire and release", func(b *testing.B) {
		s := benchScene(b, rdb)
		s.cost(b, 100, nil, func() {
			id := s.writer("A")
			s.acquire(id)
			s.release(id, 0)
		})
		s.clear()
	})
	b.Run("op=acquire and release/quorum", func(b *testing.B) {
		s := benchMember(b, rdb)
		s.cost(b, 100, nil, func() {
			id := s.writer("A")
			s.release(id, s.acquire(id).Token+1)
		})
		s.clear()
	})
	b.Run("op=enqueue/quorum", func(b *testing.B) {
		s := benchMember(b, rdb)
		s.acquire(s.writer("A"))
		s.acquire(s.writer("B"))
		c := s.acquireOf(s.writer("C"))
		s.cost(b, 1, func() {
			s.cancel(c.ID, 0)
			c.ID, c.Ticket = s.writer("C"), uint64(time.Now().UnixMicro())
		}, func() { s.must(s.do(c)) })
		s.clear()
	})
	for _, proof := range []bool{false, true} {
		b.Run(fmt.Sprint("op=hand-off/proof=", proof), func(b *testing.B) {
			s := benchScene(b, rdb)
			inboxes := rdb.Subscribe(context.Background(), s.srv.Inboxes+inboxOf("A"), s.srv.Inboxes+inboxOf("B"))
			defer inboxes.Close()
			for range 2 {
				if _, err := inboxes.Receive(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
			go func() { // ends when inboxes is closed
				for range inboxes.Channel() {
				}
			}()
			var owner, next string
			s.acquire(s.writer("A"))
			owner = s.look().value
			s.cost(b, 1, func() {
				next = s.writer("B")
				if proof {
					next = counted(next)
				}
				s.acquire(next)
			}, func() { s.release(owner, 0); owner = next })
			s.clear()
		})
	}
}

// benchScene returns a scene with a lock on rdb's server.
func benchScene(b *testing.B, rdb *redis.Client) *scene {
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		b.Fatal(err)
	}
	return &scene{t: b, rdb: rdb, srv: New(rdb, ""), keys: k, real: true}
}

// benchMember is like benchScene, but uses the server as a member of a quorum.
func benchMember(b *testing.B, rdb *redis.Client) *scene {
	s := benchScene(b, rdb)
	s.srv = NewMember(rdb, "", time.Minute)
	s.raw("SET", s.srv.mark, "1")
	return s
}

// cost reports how much time a call of run costs the server. It measures groups of size calls;
// prepare runs before each group and is not counted.
func (s *scene) cost(b *testing.B, size int, prepare, run func()) {
	var all []float64
	for b.Loop() {
		if prepare != nil {
			prepare()
		}
		before := s.spent()
		for range size {
			run()
		}
		all = append(all, float64(s.spent()-before)/float64(size))
	}
	slices.Sort(all)
	all = all[:(len(all)+1)/2]
	total := 0.0
	for _, us := range all {
		total += us
	}
	b.ReportMetric(total/float64(len(all)), "server-µs")
}

// spent returns how many µs the server has spent in scripts so far.
func (s *scene) spent() int64 {
	s.t.Helper()
	var total int64
	for line := range strings.Lines(s.rdb.Info(context.Background(), "commandstats").Val()) {
		name, rest, _ := strings.Cut(line, ":")
		if name != "cmdstat_evalsha" && name != "cmdstat_eval" {
			continue
		}
		_, rest, _ = strings.Cut(rest, "usec=")
		digits, _, _ := strings.Cut(rest, ",")
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		total += n
	}
	return total
}
