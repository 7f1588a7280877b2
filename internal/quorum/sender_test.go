package quorum

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Commands share a context, and each has nearly all of the time that a command has, and no more.
func TestTheContextThatCommandsShareLeavesEachItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base, end := context.WithCancel(t.Context())
		defer end()
		s := &Server{base: base}
		made := map[context.Context]bool{}
		const span = 20 * time.Second
		for range span / (10 * time.Millisecond) {
			ctx := s.limited()
			made[ctx] = true
			ends, ok := ctx.Deadline()
			if left := time.Until(ends); !ok || ctx.Err() != nil || left > protocol.CommandTimeout || left < protocol.CommandTimeout*15/16 {
				t.Fatalf("%v are left, %v", left, ctx.Err())
			}
			time.Sleep(10 * time.Millisecond)
		}
		if most := int(span/(protocol.CommandTimeout/16)) + 1; len(made) > most {
			t.Errorf("%d contexts in %v, want %d at most", len(made), span, most)
		}
		ctx := s.limited()
		end()
		if ctx.Err() == nil {
			t.Error("it goes on after the client's end")
		}
	})
}
