package simulation

import (
	"slices"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// These checks are about minimum holds: once an Unlock has confirmed that the lock was its caller's,
// nobody else, foreign clients included, has got or gets the lock before the caller's minimum hold
// is over.

const maxMinHold = 3 * time.Second

// promise is the minimum hold of an admitted caller.
type promise struct {
	since, until time.Time
	left         time.Time // when its caller unlocked, zero if it has not
	kept         bool      // Unlock returned nil
	client       *simClient
	ids          []string // of the requests under which its caller may have owned, once it has unlocked
}

// entered checks that all minimum holds are over when x, or a foreign client if x is nil, gets
// the lock. It then begins x's own minimum hold.
func (w *world) entered(x *lockstate.Caller) {
	for who, p := range w.promises {
		switch {
		case !w.now.Before(p.until):
			delete(w.promises, who)
		case p.kept && !w.accidentAt.After(p.since):
			w.fail("somebody got the lock %v before the end of the minimum hold of token %d", p.until.Sub(w.now), who.Token)
		}
	}
	w.lastEntry = w.now
	if x != nil && x.Mode == protocol.Exclusive && x.Opts.MinHold > 0 {
		d := x.Opts.MinHold
		switch { // the client's clock and the server's may both be fast
		case w.has[rates] && w.has[farApart]:
			d -= d / 100
		case w.has[rates]:
			d -= d / 400
		}
		w.promises[x] = promise{since: w.now, until: w.now.Add(d)}
	}
}

// promised is called when an Unlock has returned.
func (w *world) promised(c *simClient, d *departure) {
	x := d.caller
	p, ok := w.promises[x]
	// If the lease had expired before a cancel proved that the lock had not been another's, no
	// release has reached Redis.
	expired := c.byToken
	// A late copy of an acquire can make its id the owner again after the lease expired. The release
	// then finds its own id, and the cool-down that it begins is too late for whoever entered before.
	remade := false
	for _, id := range d.ids {
		expired = expired && !w.cooled[id]
		remade = remade || w.copied[id] && w.lastEntry.After(p.left)
	}
	switch {
	case !ok:
	case expired, remade:
		delete(w.promises, x)
	case x.Outcome() != nil || p.left.IsZero() || w.accidentAt.After(p.since) || !w.now.Before(p.until) && !w.lastEntry.After(p.left):
		delete(w.promises, x)
	case w.lastEntry.After(p.left) && w.lastEntry.Before(p.until):
		w.fail("somebody got the lock %v before the end of the minimum hold of token %d, which was unlocked %v earlier",
			p.until.Sub(w.lastEntry), x.Token, w.lastEntry.Sub(p.left))
	default:
		w.count("a minimum hold outlasts its Unlock")
		p.kept = true
		w.promises[x] = p
	}
}

// outlasts reports whether a minimum hold goes on after a failover that has undone its release: then Redis names
// its owner again, for long enough, and the owner's client gives the lock up only for the rest of the time.
func (p *promise) outlasts(v view, now time.Time) bool {
	return p.kept && !p.client.dead && slices.Contains(p.ids, v.value) && v.left >= p.until.Sub(now)
}

// clamped reports whether a cool-down was cut to the length that its value names, because the
// server's clock had gone back.
func clamped(value string, left time.Duration) bool {
	rest, ok := strings.CutPrefix(value, protocol.FormatTag+"cooldown:")
	ms, _, _ := strings.Cut(rest, ":")
	return ok && ms == redisserver.Milliseconds(left)
}
