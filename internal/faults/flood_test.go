//go:build unix

package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// Somebody with the right to publish sends each inbox forged messages, 10,000 a second in all:
// some malformed, some about requests that never existed, some about the owner of a held lock.
func TestAFloodOfForgedMessagesChangesNothingAndPilesNothingUp(t *testing.T) {
	const each = 10 * time.Millisecond // between batches of 100 messages
	batches := 300
	if testing.Short() {
		batches = 100
	}
	s := redistest.Server(t)
	var workers []*worker
	for range 3 {
		workers = append(workers, &worker{client: newClient(t, s.Client(), "")})
	}
	l := mustLock(t, workers[0].client.Mutex("held"))
	owner := s.Client().Get(t.Context(), "held").Val()
	waiting := wait(within(t, time.Minute), workers[1].client.Mutex("held"))
	queued(t, workers[0].client, "held", 1)
	busy := &till{}
	stop := start(t, workers, "busy", busy)
	turns(t, workers)
	inboxes := s.Client().PubSubChannels(t.Context(), "leased:inbox:*").Val()
	if len(inboxes) != len(workers) {
		t.Fatalf("%d inboxes", len(inboxes))
	}
	before, most := runtime.NumGoroutine(), 0

	flood := s.Client()
	tick := time.NewTicker(each)
	defer tick.Stop()
	for n := range batches {
		<-tick.C
		_, err := flood.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for i := range 100 {
				to := inboxes[i%len(inboxes)]
				client := strings.TrimPrefix(to, "leased:inbox:")
				never := fmt.Sprintf("leased1:w:30000:c:%08x%08x:%s", rand.Uint32(), rand.Uint32(), client)
				text := [...]string{
					"leased1:granted 9007199254739999 1 0 - " + never + " busy",
					"leased1:wanted " + never + " held",
					"leased1:granted 9007199254739999 1 1 - " + owner + " held",
					"leased1:wanted " + owner + " held",
					"leased1:ends 0 " + never + " busy",
					"leased1:revoked 1 " + owner + " held", // older than the grant
					"leased1:echo " + fmt.Sprint(n*100+i+1_000_000),
					"leased1:granted", "leased9:granted 1 " + never, strings.Repeat("x", 2000), "",
				}[rand.IntN(11)]
				p.Publish(t.Context(), to, text)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, runtime.NumGoroutine())
	}
	turns(t, workers)
	stop()
	// Allowed are commands and cancels in flight, one of each per lock and client, and their connections.
	if most > before+30 {
		t.Errorf("%d goroutines, %d before", most, before)
	}
	if err := l.Context().Err(); err != nil {
		t.Errorf("the lease ended: %v", context.Cause(l.Context()))
	}
	mustUnlock(t, l)
	next := entered(t, waiting)
	if next.lease.Token() <= l.Token() || next.lease.Token() > l.Token()+uint64(time.Hour.Microseconds()) {
		t.Errorf("token %d after %d", next.lease.Token(), l.Token())
	}
	mustUnlock(t, next.lease)
	if lost, unproved := losses(workers); lost > 0 || unproved > 2 || busy.refused > 0 {
		t.Errorf("%d leases lost, %d releases without answer, %d writes refused", lost, unproved, busy.refused)
	}
	busy.check(t, "busy")
	t.Logf("%d messages, at most %d goroutines, %d before", batches*100, most, before)
}
