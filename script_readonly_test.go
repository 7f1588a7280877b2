package leased

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// A server that was primary and is a replica now may be behind, or never have heard
// of an owner. Whether an id owns is not for it to say.
func TestAReadOnlyServerDoesNotSayThatAnOwnerOwnsNoMore(t *testing.T) {
	primary, replica := redistest.Server(t), redistest.Server(t)
	rdb := replica.Client()
	s := newScene(t, rdb, "", "x")
	host, port, err := net.SplitHostPort(primary.Addr)
	if err != nil {
		t.Fatal(err)
	}
	stale := func(f func()) { // what f does is the last that the replica hears of
		s.raw("REPLICAOF", "NO", "ONE")
		s.clear()
		f()
		s.raw("REPLICAOF", "127.0.0.1", "1") // nobody is there
	}
	owner, reader := s.writer("A"), s.reader("A")
	states := map[string]func(){
		"nobody owns":               func() {},
		"somebody else owns":        func() { s.gets(s.acquire(s.writer("B"))) },
		"other readers own":         func() { s.gets(s.acquire(s.reader("B"))) },
		"a foreign client owns":     func() { s.raw("SET", s.keys.lock, "foreign", "PX", 60_000) },
		"one without an expiry":     func() { s.raw("SET", s.keys.lock, "foreign") },
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
					if r.outcome != unanswered && r.err == nil {
						t.Errorf("%s: %s: renewal says %d", what, id, r.outcome)
					}
					return r.err
				},
				"release":   func() error { _, err := s.do(command{verb: release, id: id}); return err },
				"yield":     func() error { _, err := s.do(command{verb: yield, id: id, next: s.writer("A")}); return err },
				"downgrade": func() error { _, err := s.do(command{verb: downgrade, id: id, next: s.reader("A")}); return err },
				"cancel":    func() error { return s.tryCancel(id, 0) },
			}
			for verb, run := range verbs {
				if verb == "downgrade" && id == reader {
					continue // nobody downgrades what is shared
				}
				err := run()
				if err == nil || !strings.Contains(err.Error(), "READONLY") {
					t.Errorf("%s: %s of %s: %v", what, verb, id[:9], err)
				}
				if definite(err) && mendable(err) {
					t.Errorf("%s: %s of %s: %v is not for the caller to hear", what, verb, id[:9], err)
				}
			}
		}
	}
	// And on a real replica of a real primary, which is cut from it.
	s.raw("REPLICAOF", host, port)
	p := newScene(t, primary.Client(), "", "x")
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if info := rdb.Info(context.Background(), "replication").Val(); strings.Contains(info, "master_link_status:up") {
			break
		}
		if time.Now().After(until) {
			t.Fatal("the replica does not follow")
		}
	}
	s.raw("REPLICAOF", "127.0.0.1", "1")
	p.gets(p.acquire(owner)) // of which the replica does not hear
	if r := s.renewal(owner); r.outcome != unanswered || r.err == nil {
		t.Errorf("renewal says %d, %v", r.outcome, r.err)
	}
	if a, err := s.do(command{verb: release, id: owner}); err == nil {
		t.Errorf("release says %+v", a)
	}
	p.owned(owner)
	p.release(owner, 0)
	s.raw("REPLICAOF", "NO", "ONE")
	s.clear()
}

// What is written for that changes nothing.
func TestARenewalOfAnotherOwnersLockChangesNothingOfIt(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for what, set := range map[string]func(){
			"nobody":               func() {},
			"foreign":              func() { s.raw("SET", s.keys.lock, "foreign", "PX", 60_000) },
			"foreign, no expiry":   func() { s.raw("SET", s.keys.lock, "foreign") },
			"of ours":              func() { s.gets(s.acquire(s.writer("B"))) },
			"readers":              func() { s.gets(s.acquire(s.reader("B"))) },
			"of another type":      func() { s.raw("HSET", s.keys.lock, "a", "b"); s.raw("PEXPIRE", s.keys.lock, 60_000) },
			"a sorted set":         func() { s.raw("ZADD", s.keys.lock, 1, "a"); s.raw("PEXPIRE", s.keys.lock, 60_000) },
			"a value like a reply": func() { s.raw("SET", s.keys.lock, "READONLY", "PX", 60_000) },
		} {
			s.clear()
			set()
			before, ends := s.photo(), s.raw("PTTL", s.keys.lock).(int64)
			for _, id := range []string{s.writer("A"), s.reader("A")} {
				if r := s.renewal(id); r.outcome != notOurs {
					t.Errorf("%s: %s: outcome %d, %v", what, id[:9], r.outcome, r.err)
				}
			}
			if after := s.photo(); after != before {
				t.Errorf("%s: made of\n%s\nthis\n%s", what, before, after)
			}
			if now := s.raw("PTTL", s.keys.lock).(int64); now > ends {
				t.Errorf("%s: %d ms left, before %d", what, now, ends)
			}
		}
		s.clear()
	})
}
