package leased

import (
	"strconv"
	"strings"
	"time"
)

// What stands in for parts of the client that have goroutines and locks: the
// decisions are the same, on the world's time.

// simCanceler is what the reaper does: each cancel is repeated until it is
// answered, and then until no earlier command about it can still arrive.
type simCanceler struct{ ghosts []*ghost }

func (k *simCanceler) add(g *ghost, now time.Time) {
	g.nextAt = now
	if g.giveUp.IsZero() {
		g.giveUp = g.until
	}
	if g.giveUp.IsZero() {
		g.giveUp = now.Add(ghostPatience)
	}
	k.ghosts = append(k.ghosts, g)
}

func (k *simCanceler) due() time.Time {
	var due time.Time
	for _, g := range k.ghosts {
		if due.IsZero() || g.nextAt.Before(due) {
			due = g.nextAt
		}
	}
	return due
}

// take returns what is to be sent now, taking it out.
func (k *simCanceler) take(now time.Time) (due []*ghost) {
	rest := k.ghosts[:0]
	for _, g := range k.ghosts {
		if g.nextAt.After(now) {
			rest = append(rest, g)
		} else {
			due = append(due, g)
		}
	}
	k.ghosts = rest
	return due
}

// answered returns who is to hear of it, and what is to be cancelled next.
func (k *simCanceler) answered(g *ghost, err error, now time.Time) (gone []*caller, next *ghost) {
	over := !now.Before(g.giveUp)
	if err == nil || over {
		gone, g.gone = g.gone, nil
		next, g.then = g.then, nil
	}
	if over || err == nil && g.until.IsZero() {
		return gone, next
	}
	g.pause = reapEvery
	if err != nil && g.awaited() {
		g.pause = firstReap
	}
	g.nextAt = now.Add(g.pause)
	k.ghosts = append(k.ghosts, g)
	return gone, next
}

func (k simCanceler) String() string {
	var all []string
	for _, g := range k.ghosts {
		all = append(all, short(g.id).String())
	}
	return strings.Join(all, " ")
}

func (k *simCanceler) idle() bool { return len(k.ghosts) == 0 }

// simEcho is how the inbox proves its life.
type simEcho struct {
	nonce    string
	count    int
	last     time.Time // sign of life
	alarm    time.Time // an echo was awaited for long enough
	rejoinAt time.Time
}

func (e *simEcho) challenge(now time.Time, joined bool) string {
	if !joined || e.nonce != "" || now.Sub(e.last) < echoWait {
		return ""
	}
	e.count++
	e.nonce = strconv.Itoa(e.count)
	return e.nonce
}

// answered: a command was, or failed.
func (e *simEcho) answered(c *simClient, cmd *command, a answer, err error) {
	if cmd.echo != "" && e.nonce == cmd.echo {
		receivers := noEcho
		if err == nil && a.outcome == enqueued {
			receivers = a.echo
		}
		switch now := c.now(); {
		case receivers < 0:
			e.nonce = ""
		case receivers == 0:
			e.alarm = now
		default:
			e.alarm = now.Add(echoWait)
		}
	}
	if err != nil {
		e.suspect(err)
	}
}

func (e *simEcho) suspect(err error) {
	if !definite(err) {
		e.last, e.nonce = time.Time{}, ""
	}
}

func (e *simEcho) heard(now time.Time) { e.last = now }

func (e *simEcho) arrived(_ *simClient, nonce string) {
	if nonce == e.nonce {
		e.nonce = ""
	}
}

func (e *simEcho) ring(c *simClient, now time.Time) {
	if !e.alarm.IsZero() && !e.alarm.After(now) {
		e.alarm = time.Time{}
		if e.nonce != "" {
			c.w.count("an inbox is rebuilt")
			c.w.logf("%s rebuilds its inbox", c.name)
			e.nonce, c.inbox = "", inboxDown
			e.rejoinAt = now.Add(firstRejoin)
		}
	}
	if !e.rejoinAt.IsZero() && !e.rejoinAt.After(now) {
		e.rejoinAt = time.Time{}
		c.join()
	}
}
