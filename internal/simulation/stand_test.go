package simulation

import (
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// This file does, in the world's time, what the client's goroutines do around the pure parts: the
// inbox and the probes of an outage. The cancels are in cancelDue.

// challenged handles the answer or failure of a command that may have asked for an echo.
func (c *simClient) challenged(cmd *protocol.Command, a protocol.Answer, err error) {
	if cmd.Echo != "" {
		receivers := protocol.NoEcho
		if err == nil {
			receivers = a.Published(cmd)
		}
		c.published(cmd.Echo, receivers)
	}
	if err != nil {
		c.suspect(err)
	}
}

func (c *simClient) published(nonce string, receivers int) {
	if c.hearing.ProbeCounted(nonce, receivers, c.now()) {
		c.w.count("an inbox counts no receiver")
		c.rebuild()
	}
}

// prove is called after a renewal: an owner that has heard nothing for long demands an
// echo.
func (c *simClient) prove() {
	w := c.w
	nonce := c.hearing.StartProbe(c.now(), lockstate.OwnerSilence)
	if nonce == "" {
		return
	}
	w.count("an owner demands an echo")
	receivers := protocol.NoEcho
	if !w.now.Before(w.outage) {
		if n, ok := w.server.do("PUBLISH", protocol.InboxChannel("", c.id), protocol.FormatTag+"echo "+nonce).(int); ok {
			receivers = n
		}
	}
	c.published(nonce, receivers)
}

func (c *simClient) suspect(err error) {
	if !redisserver.Classify(err).Lasts() {
		c.hearing.RequireProbe()
	}
}

// rebuild makes the client subscribe again.
func (c *simClient) rebuild() {
	c.w.count("an inbox is rebuilt")
	c.w.logf("%s rebuilds its inbox", c.name)
	c.inbox = inboxDown
	c.rejoinAt = c.now().Add(c.hearing.Over(c.now()))
}

// listen handles the inbox's alarms.
func (c *simClient) listen(now time.Time) {
	if c.hearing.Overdue(now) {
		c.rebuild()
	}
	if !c.rejoinAt.IsZero() && !c.rejoinAt.After(now) {
		c.rejoinAt = time.Time{}
		c.join()
	}
}

// troubled is how a client with one lock learns of an outage: it then probes every 2 s,
// however long that lock pauses.
func (c *simClient) troubled(err error) {
	c.refused = redisserver.OnlyOperatorHelps(err)
	if !c.refused && c.probeAt.IsZero() {
		c.probeAt = c.now().Add(simProbeEvery)
	}
}

func (c *simClient) probe(now time.Time) {
	if c.probeAt.IsZero() || c.probeAt.After(now) {
		return
	}
	c.probeAt = time.Time{}
	c.step("reconnected", c.lock.Reconnected) // for all that the client knows, its connections were silent
	if c.pauses == 0 || c.lock.CommandInFlight() {
		return
	}
	asked := false
	c.step("reachable", func(now time.Time, fx *lockstate.Effects) { asked = c.lock.Reachable(now, fx) })
	if asked {
		c.w.count("an outage is probed")
		c.probeAt = now.Add(simProbeEvery)
	}
}

// cancels lists the requests that are still to be canceled.
func (c *simClient) cancels() string {
	var all []string
	for _, g := range c.cancel.Pending {
		all = append(all, short(g.ID).String())
	}
	return strings.Join(all, " ")
}
