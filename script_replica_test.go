package leased

import (
	"context"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

// A primary that was demoted, or a replica whose link is cut, does not know of the
// newest owners. What it does not know of, it must not call another's: an answer about
// ownership comes from a server that takes writes, or there is none.
func TestAReadOnlyServerThatIsBehindGivesNoAnswer(t *testing.T) {
	r := redistest.NewReplication(t, 1)
	primary, replica := r.Nodes[0].Client(), r.Nodes[1].Client()
	redistest.CheckLeaks(t, primary, "")
	s := newScene(t, primary, "", "x")
	w := s.writer("A")
	s.acquire(w)
	s.release(w, 0) // both servers have seen the lock
	r.Nodes[1].Isolate()
	behind := newScene(t, replica, "", "x")

	readOnly := func(t *testing.T, what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "READONLY") {
			t.Errorf("%s was answered, error %v", what, err)
		}
		if err != nil && !definite(err) {
			t.Errorf("%s: %v is no answer of Redis", what, err)
		}
	}
	for _, m := range []mode{exclusive, shared} {
		t.Run(string(m), func(t *testing.T) {
			s.t, behind.t = t, t
			id, next := s.id("A", m, long), s.id("A", m, long)
			s.acquire(id)

			_, err := behind.do(behind.acquireOf(s.id("A", m, long)))
			readOnly(t, "acquire", err)
			try := behind.acquireOf(s.id("A", m, long))
			try.wait = false
			_, err = behind.do(try)
			readOnly(t, "a try", err)
			for _, last := range []uint64{0, 1} {
				_, err = behind.do(command{verb: release, id: id, last: last})
				readOnly(t, "release", err)
			}
			_, err = behind.do(command{verb: yield, id: id, next: next})
			readOnly(t, "yield", err)
			if m == exclusive {
				_, err = behind.do(command{verb: downgrade, id: id, next: s.reader("A")})
				readOnly(t, "downgrade", err)
			}
			renewal := behind.renewal(id)
			if renewal.outcome != unanswered {
				t.Errorf("renew said %v", renewal.outcome)
			}
			readOnly(t, "renew", renewal.err)
			_, err = behind.srv.evict(context.Background(), &behind.keys)
			readOnly(t, "evict", err)

			if !s.renew(id) {
				t.Error("the primary does not know the owner any more")
			}
			s.release(id, 0)
		})
	}
}

// Where the primary is behind in the other way, with an owner that has let go since,
// its answer is refused as well.
func TestAReadOnlyServerThatIsBehindRenewsNothing(t *testing.T) {
	r := redistest.NewReplication(t, 1)
	primary, replica := r.Nodes[0].Client(), r.Nodes[1].Client()
	redistest.CheckLeaks(t, primary, "")
	s, behind := newScene(t, primary, "", "x"), newScene(t, replica, "", "x")
	id := s.writer("A")
	s.acquire(id)
	if err := primary.Wait(t.Context(), 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	r.Nodes[1].Isolate()
	s.release(id, 0)
	if got := behind.renewal(id); got.outcome != unanswered {
		t.Errorf("renew said %v", got.outcome)
	}
	if a, err := behind.do(behind.acquireOf(id)); err == nil {
		t.Errorf("acquire said %+v", a)
	}
	if a, err := behind.do(command{verb: release, id: id}); err == nil {
		t.Errorf("release said %+v", a)
	}
}
