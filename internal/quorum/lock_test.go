package quorum

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Where the servers' clocks differ by more than a fraction of the TTL, nobody is admitted
// before a majority keeps the token.
func TestATokenFarAheadIsWrittenBackFirst(t *testing.T) {
	const client = "AAAAAAAAAAAAAAAA:test"
	cfg := &Config{N: 3, Need: 2,
		NewID: func(like protocol.Identity) string {
			return protocol.NewRequest(client, like.Mode, like.TTL, false, like.Proof, protocol.Origin{}).ID
		},
		Proof:  func(int) protocol.Proof { return protocol.Unproved },
		Ticket: func() uint64 { return 1 },
		Away:   func(int) bool { return false },
	}
	k, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	l := NewLock(cfg, &k)
	now := time.Now()
	id := protocol.NewRequest(client, protocol.Exclusive, time.Second, false, protocol.Unproved, protocol.Origin{}).ID
	var fx Effects
	op := l.Do(&protocol.Command{Verb: protocol.Acquire, ID: id, TTL: time.Second, Wait: true, At: now}, now, &fx)
	sends := fx.Sends
	var adopts []*Send
	for i, token := range []uint64{9_000_000, 1_000_000} {
		fx = Effects{}
		l.Answered(sends[i], Result{Answer: protocol.Answer{Outcome: protocol.Granted, Token: token, Clock: token}}, now, &fx)
		adopts = append(adopts, fx.Sends...)
	}
	if op.Decided() || len(adopts) != 1 || adopts[0].Kind != Adopt || adopts[0].Server != 1 || adopts[0].Token != 9_000_000 {
		t.Fatalf("decided %v, sent %+v", op.Decided(), adopts)
	}
	fx = Effects{}
	l.Answered(adopts[0], Result{Answer: protocol.Answer{Outcome: protocol.Done}}, now, &fx)
	if !op.Decided() || op.Answer.Token != 9_000_000 || op.Answer.Clock != 1_000_000 {
		t.Errorf("decided %v: %+v", op.Decided(), op.Answer)
	}
}
