package quorum

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// From the first answer on, the servers' clock determines a request's place in the queue, however far it is
// from our clock. An answer that was slow changes little.
func TestTicketsFollowTheServersClock(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Hour, -time.Second, 0, time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			s := &Server{members: []*member{{}, {}, {}}, clock: serversClock{began: time.Now()}}
			shows := func(want time.Duration, when string) {
				t.Helper()
				if got := time.Duration(int64(s.ticket())-time.Now().UnixMicro()) * time.Microsecond; got != want {
					t.Errorf("%v: it is placed %v ahead of our clock, want %v", when, got, want)
				}
			}
			answers := func(server int, ahead time.Duration) {
				s.compareClocks(server, uint64(time.Now().Add(ahead).UnixMicro()))
			}
			const another = 100 * time.Millisecond // how far the other servers' clocks are from that of server 0
			shows(0, "before there was an answer")
			answers(2, ahead-another)
			shows(ahead-another, "after the answer of the last server, which came first")
			answers(0, ahead)
			shows(ahead, "after that of the first")
			answers(1, ahead+another)
			shows(ahead, "after that of another")
			answers(0, ahead-protocol.CommandTimeout)
			shows(ahead-protocol.CommandTimeout/32, "after a late answer")
			answers(0, ahead)
			shows(ahead, "after another that was not")
			for _, set := range []time.Duration{time.Minute, -time.Minute} {
				answers(0, ahead+set)
				shows(ahead+set, "after a clock was set")
			}
			answers(0, ahead)
			s.members[0].away = true
			answers(1, ahead-another)
			shows(ahead-another, "when the first server is away")
			s.members[0].away = false
			answers(0, ahead)
			shows(ahead, "when it is back")
			first, later := &protocol.Command{Verb: protocol.Acquire, First: true}, &protocol.Command{Verb: protocol.Acquire}
			s.members[0].tookRequest(first, &Result{Fail: &protocol.Failure{Kind: protocol.RefusedNow}})
			s.members[0].tookRequest(first, &Result{Fail: &protocol.Failure{Kind: protocol.NoAnswer}})
			s.members[0].tookRequest(first, &Result{Answer: protocol.Answer{Outcome: protocol.Refused}}) // the lock is taken
			s.members[0].tookRequest(later, &Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
			answers(1, ahead-another)
			answers(0, ahead)
			shows(ahead-another, "when the first server refuses new requests, though it answers others")
			s.members[0].tookRequest(first, &Result{Answer: protocol.Answer{Outcome: protocol.Enqueued}})
			answers(0, ahead)
			shows(ahead, "when it does not anymore")
		})
	}
}
