package leased

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// unrenewing answers everything but renewals.
type unrenewing struct{ *mirror }

func (unrenewing) renew(_ context.Context, batch []renewal) {
	for i := range batch {
		batch[i].err = errSilence
	}
}

// Renewals have no pauses: when they fail and nobody waits, nobody has to probe, and
// nobody looks every 2 s for ever whether somebody should.
func TestVirtualATroubleThatNoLockWaitsOutIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := onMirror(t, 0, 0)
		well := c.server.(*mirror)
		c.server = unrenewing{well}
		mu := c.Mutex("x")
		mu.Lock()
		time.Sleep(15 * time.Second)
		if !c.outage.on.Load() {
			t.Error("the failure of a renewal was not noticed")
		}
		mu.Unlock()
		time.Sleep(10 * time.Second)
		c.outage.mu.Lock()
		defer c.outage.mu.Unlock()
		if c.outage.on.Load() || !c.outage.next.IsZero() {
			t.Error("the trouble goes on though no lock is in it")
		}
	})
}
