package redisserver

import (
	"context"
	"io"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// The token shows whether a late message is about an earlier grant.
func TestRevokedCarriesTheTokenOfTheEvictedGrant(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		id, next := s.writer("A"), s.writer("B")
		token := s.gets(s.acquire(id))
		s.waits(s.acquire(next), 0)
		inbox.receives(id, protocol.MessageWanted)
		if owners := s.evict(); len(owners) != 1 || owners[0] != id {
			t.Errorf("evicted %q", owners)
		}
		if m := inbox.receives(id, protocol.MessageRevoked)[0]; m.Token != token {
			t.Errorf("revoked token %d, want %d", m.Token, token)
		}
		s.owned(next)
		if st := s.look(); st.token() <= token {
			t.Errorf("the next owner has token %d, the evicted one %d", st.token(), token)
		}
	})
}

func TestAllReadersAreEvictedAndTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inboxA, inboxB := s.listen("A"), s.listen("B")
		a, b := s.reader("A"), s.reader("B")
		s.gets(s.acquire(a))
		token := s.gets(s.acquire(b))
		if owners := s.evict(); len(owners) != 2 {
			t.Errorf("evicted %q", owners)
		}
		if m := inboxA.receives(a, protocol.MessageRevoked)[0]; m.Token < token {
			t.Errorf("revoked token %d below %d", m.Token, token)
		}
		inboxB.receives(b, protocol.MessageRevoked)
		s.owned()
	})
}

func TestAllOfManyEvictedReadersAreTold(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("A")
		var readers []string
		for range 250 {
			readers = append(readers, s.id("A", protocol.Shared, ample))
			s.gets(s.acquire(readers[len(readers)-1]))
		}
		s.raw("ZADD", s.keys.Readers(), s.now()+500_000, "leased2:another") // of a later version, which is not notified
		token := s.look().token()
		if owners := s.evict(); len(owners) != 251 {
			t.Errorf("%d were evicted", len(owners))
		}
		told := map[string]bool{}
		for _, m := range inbox.received() {
			if m.Kind != protocol.MessageRevoked || m.Token != token || m.Key != s.keys.Lock {
				t.Fatalf("%+v, want token %d", m, token)
			}
			told[m.ID] = true
		}
		if len(told) != 250 {
			t.Errorf("%d of 250 were told", len(told))
		}
		s.owned()
	})
}

// An owner that was evicted from a majority of a quorum's servers gives the lock back on the others,
// which lets the next owner in there. An eviction that arrives afterwards must not evict that one.
func TestTheNextOwnerIsNotEvictedForTheOneBefore(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		inbox := s.listen("B")
		id, next := s.writer("A"), s.writer("B")
		s.gets(s.acquire(id))
		s.waits(s.acquire(next), 0)
		s.release(id, 0)
		s.owned(next)
		before := s.look()
		owners, err := s.srv.EvictOwner(context.Background(), &s.keys, before.token()+1_000_000_000, id)
		if err != nil || len(owners) > 0 {
			t.Errorf("evicted %q: %v", owners, err)
		}
		s.owned(next)
		if st := s.look(); st.token() != before.token() {
			t.Errorf("the last token was %d and is %d", before.token(), st.token())
		}
		inbox.receives(next, protocol.MessageGranted)
		if owners, err := s.srv.EvictOwner(context.Background(), &s.keys, 0, next); err != nil || len(owners) != 1 || owners[0] != next {
			t.Errorf("evicted %q: %v", owners, err)
		}
		s.owned()
	})
}

// The server answers again in both cases. Only a replica has certainly evicted nobody; another owner may have come
// after an eviction that had no answer.
func TestAnEvictionIsRepeatedOnlyWhereItEvictedNobody(t *testing.T) {
	for err, want := range map[error]int{
		io.EOF: 1,
		answerError("READONLY You can't write against a read only replica."): 2,
	} {
		sent := 0
		r := &road{fails: func(trip []redis.Cmder) error {
			if trip[0].Name() != "evalsha" {
				return nil
			}
			sent++
			trip[0].SetErr(err)
			return err
		}}
		onRoad(t, r, func(t *testing.T, s *Server) {
			k, bad := protocol.NewKeys("", "x")
			if bad != nil {
				t.Fatal(bad)
			}
			if _, evicted := s.Evict(t.Context(), &k); evicted == nil || sent != want {
				t.Errorf("after %v, it was sent %d times, want %d; its error is %v", err, sent, want, evicted)
			}
		})
	}
}
