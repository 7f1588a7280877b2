package leased

import (
	"context"
	"testing"
	"time"
)

// emptied is a server that owns nothing any more.
type emptied struct{ *mirror }

func (emptied) renew(_ context.Context, batch []renewal) {
	for i := range batch {
		batch[i].outcome = notOurs
	}
}

// The release was faster on the server than a renewal that was sent before it.
func TestARenewalThatCrossesAnUnlockIsNotCountedAsLost(t *testing.T) {
	c := onMirror(t, 0, 0)
	c.server = emptied{c.server.(*mirror)}
	mu := c.Mutex("x")
	mu.Lock()
	e := c.lookup("x")
	sent := renewal{entry: e, req: e.lock.grant.req, at: time.Now()}
	mu.Unlock()
	c.renew([]renewal{sent})
	if n := c.stats.renewals[renewalLost].Load(); n != 0 {
		t.Errorf("%d renewals counted as lost", n)
	}
}
