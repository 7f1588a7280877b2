package redisserver

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A primary that was demoted may be behind and not know the newest owners, so it must not
// answer whether an id owns.
func TestAReadOnlyServerDoesNotSayThatAnOwnerOwnsNoMore(t *testing.T) {
	t.Parallel()
	primary, replica := redistest.Server(t), redistest.Server(t)
	rdb := replica.Client()
	s := newScene(t, rdb, "", "x")
	host, port, err := net.SplitHostPort(primary.Addr)
	if err != nil {
		t.Fatal(err)
	}
	stale := func(f func()) { // the replica receives nothing after f
		s.raw("REPLICAOF", "NO", "ONE")
		s.clear()
		f()
		s.raw("REPLICAOF", "127.0.0.1", "1") // no server listens there
	}
	owner, reader := s.writer("A"), s.reader("A")
	states := map[string]func(){
		"nobody owns":               func() {},
		"somebody else owns":        func() { s.gets(s.acquire(s.writer("B"))) },
		"other readers own":         func() { s.gets(s.acquire(s.reader("B"))) },
		"a foreign client owns":     func() { s.raw("SET", s.keys.Lock, "foreign", "PX", 60_000) },
		"one without an expiry":     func() { s.raw("SET", s.keys.Lock, "foreign") },
		"the id waits, others own":  func() { s.acquire(s.writer("B")); s.acquire(owner); s.acquire(reader) },
		"the id owns":               func() { s.acquire(owner) },
		"the id owns among readers": func() { s.acquire(reader) },
	}
	for what, state := range states {
		stale(state)
		for _, id := range []string{owner, reader} {
			verbs := map[string]func() error{
				"renew": func() error {
					r := s.renewal(id)
					if r.Outcome != protocol.Unanswered && r.Err == nil {
						t.Errorf("%s: %s: renewal says %d", what, id, r.Outcome)
					}
					return r.Err
				},
				"release": func() error { _, err := s.do(protocol.Command{Verb: protocol.Release, ID: id}); return err },
				"release in doubt": func() error {
					_, err := s.do(protocol.Command{Verb: protocol.Release, ID: id, Proof: 1})
					return err
				},
				"yield": func() error {
					_, err := s.do(protocol.Command{Verb: protocol.Yield, ID: id, Next: s.writer("A")})
					return err
				},
				"downgrade": func() error {
					_, err := s.do(protocol.Command{Verb: protocol.Downgrade, ID: id, Next: s.reader("A")})
					return err
				},
				"cancel": func() error { return s.tryCancel(id, 0, 0) },
			}
			for verb, run := range verbs {
				if verb == "downgrade" && id == reader {
					continue // only a writer can be downgraded
				}
				err := run()
				if err == nil || !strings.Contains(err.Error(), "READONLY") {
					t.Errorf("%s: %s of %s: %v", what, verb, id[:9], err)
				}
				if IsServerReply(err) && OnlyOperatorHelps(err) {
					t.Errorf("%s: %s of %s: %v is not for the caller to hear", what, verb, id[:9], err)
				}
			}
		}
	}
	// The same on a real replica that was cut off from its primary.
	s.raw("REPLICAOF", host, port)
	p := newScene(t, primary.Client(), "", "x")
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) { // between two polls
		if info := rdb.Info(context.Background(), "replication").Val(); strings.Contains(info, "master_link_status:up") {
			break
		}
		if time.Now().After(until) {
			t.Fatal("the replica does not follow")
		}
	}
	s.raw("REPLICAOF", "127.0.0.1", "1")
	p.gets(p.acquire(owner)) // the replica does not receive this
	if r := s.renewal(owner); r.Outcome != protocol.Unanswered || r.Err == nil {
		t.Errorf("renewal says %d, %v", r.Outcome, r.Err)
	}
	if a, err := s.do(protocol.Command{Verb: protocol.Release, ID: owner}); err == nil {
		t.Errorf("release says %+v", a)
	}
	p.owned(owner)
	p.release(owner, 0)
	s.raw("REPLICAOF", "NO", "ONE")
	s.clear()
}

// Its write, which a read-only server refuses, changes nothing.
func TestARenewalOfAnotherOwnersLockChangesNothingOfIt(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for what, set := range map[string]func(){
			"nobody":               func() {},
			"foreign":              func() { s.raw("SET", s.keys.Lock, "foreign", "PX", 60_000) },
			"foreign, no expiry":   func() { s.raw("SET", s.keys.Lock, "foreign") },
			"of ours":              func() { s.gets(s.acquire(s.writer("B"))) },
			"readers":              func() { s.gets(s.acquire(s.reader("B"))) },
			"of another type":      func() { s.raw("HSET", s.keys.Lock, "a", "b"); s.raw("PEXPIRE", s.keys.Lock, 60_000) },
			"a sorted set":         func() { s.raw("ZADD", s.keys.Lock, 1, "a"); s.raw("PEXPIRE", s.keys.Lock, 60_000) },
			"a value like a reply": func() { s.raw("SET", s.keys.Lock, "READONLY", "PX", 60_000) },
		} {
			s.clear()
			set()
			before, ends := s.photo(), s.raw("PTTL", s.keys.Lock).(int64)
			for _, id := range []string{s.writer("A"), s.reader("A")} {
				if r := s.renewal(id); r.Outcome != protocol.NotOurs {
					t.Errorf("%s: %s: outcome %d, %v", what, id[:9], r.Outcome, r.Err)
				}
			}
			if after := s.photo(); after != before {
				t.Errorf("%s: made of\n%s\nthis\n%s", what, before, after)
			}
			if now := s.raw("PTTL", s.keys.Lock).(int64); now > ends {
				t.Errorf("%s: %d ms left, before %d", what, now, ends)
			}
		}
		s.clear()
	})
}

// The same for all commands, on a replica whose link is cut: an answer about ownership comes
// from a server that takes writes, or there is none.
func TestAReadOnlyServerThatIsBehindGivesNoAnswer(t *testing.T) {
	r := redistest.NewReplication(t, 1)
	primary, replica := r.Nodes[0].Client(), r.Nodes[1].Client()
	redistest.CheckLeaks(t, primary, "")
	s := newScene(t, primary, "", "x")
	w := s.writer("A")
	s.acquire(w)
	s.release(w, 0)
	if err := primary.Wait(t.Context(), 1, 0).Err(); err != nil { // both servers have seen the lock
		t.Fatal(err)
	}
	r.Nodes[1].Isolate()
	behind := newScene(t, replica, "", "x")

	readOnly := func(t *testing.T, what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "READONLY") {
			t.Errorf("%s was answered, error %v", what, err)
		}
		if err != nil && !IsServerReply(err) {
			t.Errorf("%s: %v is not an answer from Redis", what, err)
		}
	}
	for _, m := range []protocol.Mode{protocol.Exclusive, protocol.Shared} {
		t.Run(string(m), func(t *testing.T) {
			s.t, behind.t = t, t
			id, next := s.id("A", m, long), s.id("A", m, long)
			s.acquire(id)

			_, err := behind.do(behind.acquireOf(s.id("A", m, long)))
			readOnly(t, "acquire", err)
			try := behind.acquireOf(s.id("A", m, long))
			try.Wait = false
			_, err = behind.do(try)
			readOnly(t, "a try", err)
			for _, last := range []uint64{0, 1} {
				_, err = behind.do(protocol.Command{Verb: protocol.Release, ID: id, Last: last})
				readOnly(t, "release", err)
			}
			_, err = behind.do(protocol.Command{Verb: protocol.Yield, ID: id, Next: next})
			readOnly(t, "yield", err)
			if m == protocol.Exclusive {
				_, err = behind.do(protocol.Command{Verb: protocol.Downgrade, ID: id, Next: s.reader("A")})
				readOnly(t, "downgrade", err)
			}
			renewal := behind.renewal(id)
			if renewal.Outcome != protocol.Unanswered {
				t.Errorf("renew said %v", renewal.Outcome)
			}
			readOnly(t, "renew", renewal.Err)
			_, err = behind.srv.Evict(context.Background(), &behind.keys)
			readOnly(t, "evict", err)

			if !s.renew(id) {
				t.Error("the primary does not know the owner anymore")
			}
			s.release(id, 0)
		})
	}
}

// The same if the replica still shows an owner that has released the lock since: neither that owner nor
// anybody else gets an answer.
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
	if got := behind.renewal(id); got.Outcome != protocol.Unanswered {
		t.Errorf("renew said %v", got.Outcome)
	}
	if a, err := behind.do(behind.acquireOf(id)); err == nil {
		t.Errorf("acquire said %+v", a)
	}
	for _, id := range []string{s.writer("B"), s.reader("B")} {
		for _, wait := range []bool{false, true} {
			other := behind.acquireOf(id)
			other.Wait = wait
			if a, err := behind.do(other); err == nil || !strings.Contains(err.Error(), "READONLY") {
				t.Errorf("another's acquire said %+v, %v", a, err)
			}
		}
	}
	if a, err := behind.do(protocol.Command{Verb: protocol.Release, ID: id}); err == nil {
		t.Errorf("release said %+v", a)
	}
}
