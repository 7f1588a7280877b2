package simulation

import (
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// The checks here judge a process by what the server did and answered, and not by what its own state
// machine believes: otherwise an answer that it ignores would excuse the loss that follows.

// reasonsSlack is what a process may do later than the rules say, because times are cut to whole ms.
const reasonsSlack = 10 * time.Millisecond

// extended notes a renewal whose answer extends the grant of c.
func (w *world) extended(c *simClient, r *protocol.Renewal) {
	g := c.status()
	if r.Err == nil && r.Outcome == protocol.Granted && g.State == lockstate.Held && g.Req.ID == r.Req.ID && !g.Req.Provisional &&
		c.now().Before(g.Trust) && !g.Drifted(c.now()) && r.At.After(w.heard[r.Req.ID]) {
		w.heard[r.Req.ID] = r.At
	}
}

// dispossess notes which requests stopped owning the lock in a script other than their own commands and cancels.
// What ends between two scripts is noted by disowned.
func (w *world) dispossess(before, after view, p *packet) {
	for _, id := range append(sortedKeys(before.readers), before.value) {
		own := p.kind == requestPacket && p.cmd.ID == id || p.kind == cancelPacket && p.g.ID == id
		if id != "" && before.owns(id) && !after.owns(id) && !own {
			w.taken[id] = true
		}
	}
}

// lostInTime checks a lease that was lost because it was not renewed: enough time must have passed since the
// last answered renewal was sent.
func (w *world) lostInTime(c *simClient, before *lockstate.Status, why lockstate.Reason) {
	at, extended := w.heard[before.Req.ID]
	if why != lockstate.NotConfirmed || before.State != lockstate.Held || !extended || before.Drifted(c.now()) ||
		before.Downgrading { // a reader's lease counts from the sending of the downgrade, which takes no longer than 2 s in reality
		return
	}
	w.count("a loss is judged by its renewals")
	ttl := before.Req.TTL
	if spent := lockstate.Elapsed(at, c.now()); spent < ttl-ttl/100-2*time.Millisecond {
		w.fail("%s lost %s %v after it sent a renewal that was answered", c.name, short(before.Req.ID), spent)
	}
}

// lostAtRelease checks an Unlock that says that the release found the lock lost.
func (w *world) lostAtRelease(c *simClient, d *departure) {
	if !d.sound || !d.asked || d.unused || len(d.ids) != 1 || d.caller.Why != lockstate.LostAtRelease {
		return
	}
	w.count("a loss is judged at the release")
	if id := d.ids[0]; !w.taken[id] && !w.excuse(id) && !w.struck[id] && !w.copied[id] {
		w.fail("%s: Unlock says that %s was lost, from which nobody has taken the lock", c.name, short(id))
	}
}

// doubted checks the answer to a release in doubt: a writer from which nobody has taken the lock has that proved.
func (w *world) doubted(p *packet, a protocol.Answer) {
	id := p.cmd.ID
	who, _ := protocol.ParseID(id)
	if p.kind != requestPacket || p.cmd.Verb != protocol.Release || p.cmd.Proof == 0 || a.Outcome != protocol.Done || who.Mode != protocol.Exclusive {
		return
	}
	if w.count("a release in doubt"); a.Proved {
		w.count("a release in doubt is proved")
		return
	}
	if !w.taken[id] && !w.excuse(id) && !w.copied[id] {
		w.fail("the release of %s proves nothing, from which nobody has taken the lock", short(id))
	}
}

// paced checks that c asks about a grant that it holds after a third of its TTL.
func (w *world) paced(c *simClient) {
	g := c.status()
	if g.State != lockstate.Held || !g.Renewed || c.paused || !c.lock.Due().Time(c.Start()).After(c.now()) {
		return
	}
	w.counts["a pace is judged"]++
	limit := g.Req.TTL/3 + g.Req.TTL/300 + reasonsSlack
	if w.now.Sub(c.asked) > limit && w.now.Sub(c.woke) > limit && c.now().Sub(g.Since) > limit {
		w.fail("%s has not asked about %s for %v", c.name, short(g.Req.ID), w.now.Sub(c.asked))
	}
}

// endsInTime checks that the lease of x, as its context shows it, has ended once its grant is trusted no
// longer.
func (w *world) endsInTime(c *simClient, x *lockstate.Caller) {
	if x.Phase != lockstate.Inside || x.Ended != lockstate.NotYet || c.believes(x) {
		return
	}
	w.counts["an end is awaited"]++
	runs := !c.paused && !c.asleep && !c.drowsy() && w.now.Sub(c.woke) > time.Millisecond
	if runs && c.lock.Due().Time(c.Start()).After(c.now()) {
		w.fail("the lease %d of %s has not ended, and the lock is not believed to be its own: %s", x.Token, c.name, c.status())
	}
}
