package leased

import (
	"strings"
	"sync"
	"testing"

	mini "github.com/alicebob/miniredis/v2/server"

	"github.com/leasedmutex/leased/internal/redistest"
)

// counting makes the embedded server say that so many listen to client B's inbox and
// that so many heard a message, and returns what was published to it.
func counting(t *testing.T, listen, heard int) (s *scene, published func() []string) {
	t.Helper()
	server := redistest.MiniTCP(t)
	s = newScene(t, clientOf(t, server.Addr()), "", "x")
	channel := s.srv.inboxes + inboxOf("B")
	var mu sync.Mutex // guards texts: the hook runs in the server's goroutine
	var texts []string
	server.Server().SetPreHook(func(p *mini.Peer, cmd string, args ...string) bool {
		switch {
		case cmd == "PUBSUB" && args[1] == channel:
			p.WriteLen(2)
			p.WriteBulk(channel)
			p.WriteInt(listen)
		case cmd == "PUBLISH" && args[0] == channel:
			mu.Lock()
			defer mu.Unlock()
			texts = append(texts, args[1])
			p.WriteInt(heard)
		default:
			return false
		}
		return true
	})
	return s, func() []string {
		mu.Lock()
		defer mu.Unlock()
		all := texts
		texts = nil
		return all
	}
}

// PUBLISH tells subscribers of replicas too, and counts its own server's only: after
// a failover a waiter may have heard what was counted as heard by nobody.
func TestAWaiterThatWasToldStaysOwnerThoughNobodyWasCounted(t *testing.T) {
	for _, m := range []mode{exclusive, shared} {
		for _, behind := range []bool{false, true} {
			s, published := counting(t, 1, 0)
			owner, next, last := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
			s.gets(s.acquire(owner))
			s.acquire(next)
			if behind {
				s.acquire(last)
			}
			published()
			if a := s.release(owner, 0); a.handed != 1 {
				t.Errorf("%v: %+v", m, a)
			}
			if all := published(); len(all) != 1 || !strings.HasPrefix(all[0], formatTag+"granted ") {
				t.Errorf("%v: told %q", m, all)
			}
			s.owned(next)
		}
	}
}

// What is not said need not be taken back.
func TestNothingIsSaidToAWaiterWhoIsPassedOver(t *testing.T) {
	for _, m := range []mode{exclusive, shared} {
		for verb, let := range map[string]func(s *scene, owner string){
			"release": func(s *scene, owner string) { s.release(owner, 0) },
			"yield":   func(s *scene, owner string) { s.yield(owner, s.writer("A"), 0) },
			"cancel":  func(s *scene, owner string) { s.cancel(owner, 0) },
			"evict":   func(s *scene, owner string) { s.evict() },
			"acquire": func(s *scene, owner string) { s.raw("DEL", s.keys.lock); s.acquire(s.writer("A")) },
		} {
			s, published := counting(t, 0, 1) // who would hear it all the same
			owner, gone, next := s.writer("A"), counted(s.id("B", m, long)), s.writer("C")
			s.gets(s.acquire(owner))
			s.acquire(gone)
			s.acquire(next)
			published()
			let(s, owner)
			if all := published(); len(all) > 0 {
				t.Errorf("%v, %s: told %q", m, verb, all)
			}
			s.owned(next)
		}
	}
}
