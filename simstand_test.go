package leased

import (
	"strings"
	"time"
)

// What the client's goroutines do around the pure parts, on the world's time: its
// inbox and its probes of an outage here, its cancels in cancelDue.

// challenged: a command was answered, or failed, that may have asked for an echo.
func (c *simClient) challenged(cmd *command, a answer, err error) {
	if cmd.echo != "" {
		receivers := noEcho
		if err == nil && a.outcome == enqueued {
			receivers = a.echo
		}
		c.published(cmd.echo, receivers)
	}
	if err != nil {
		c.suspect(err)
	}
}

func (c *simClient) published(nonce string, receivers int) {
	if c.hearing.published(nonce, receivers, c.now()) {
		c.w.count("an inbox counts no receiver")
		c.rebuild()
	}
}

// prove is what follows a renewal: an owner that has heard nothing for long demands an
// echo.
func (c *simClient) prove() {
	w := c.w
	nonce := c.hearing.challenge(c.now(), ownerSilence)
	if nonce == "" {
		return
	}
	w.count("an owner demands an echo")
	receivers, ok := noEcho, false
	if !w.now.Before(w.outage) {
		if receivers, ok = w.server.do("PUBLISH", inboxChannel("", c.id), formatTag+"echo "+nonce).(int); !ok {
			receivers = noEcho
		}
	}
	c.published(nonce, receivers)
}

func (c *simClient) suspect(err error) {
	if !classify(err).lasts() {
		c.hearing.suspect()
	}
}

// rebuild has the client subscribe anew.
func (c *simClient) rebuild() {
	c.w.count("an inbox is rebuilt")
	c.w.logf("%s rebuilds its inbox", c.name)
	c.inbox = inboxDown
	c.rejoinAt = c.now().Add(c.hearing.over(c.now()))
}

// listen is the inbox' alarms.
func (c *simClient) listen(now time.Time) {
	if c.hearing.overdue(now) {
		c.rebuild()
	}
	if !c.rejoinAt.IsZero() && !c.rejoinAt.After(now) {
		c.rejoinAt = time.Time{}
		c.join()
	}
}

// troubled is how a client with one lock hears of an outage: it probes every 2 s,
// whatever the pause of that lock.
func (c *simClient) troubled(err error) {
	c.refused = mendable(err)
	if !c.refused && c.probeAt.IsZero() {
		c.probeAt = c.now().Add(probeEvery)
	}
}

func (c *simClient) probe(now time.Time) {
	if c.probeAt.IsZero() || c.probeAt.After(now) {
		return
	}
	c.probeAt = time.Time{}
	if c.pauses == 0 || c.lock.grant.inFlight != nothing {
		return
	}
	asked := false
	c.step("reachable", func(now time.Time, fx *effects) { asked = c.lock.reachable(now, fx) })
	if asked {
		c.w.count("an outage is probed")
		c.probeAt = now.Add(probeEvery)
	}
}

// cancels lists what is to be cancelled yet.
func (c *simClient) cancels() string {
	var all []string
	for _, g := range c.cancel.pending {
		all = append(all, short(g.id).String())
	}
	return strings.Join(all, " ")
}
