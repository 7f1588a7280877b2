package simulation

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// view is the lock as the server has it.
type view struct {
	value   string
	odd     bool // the key has another type
	left    time.Duration
	readers map[string]bool
	queue   []string
	dead    map[string]bool // queued, but its waiting lease is over
}

func (w *world) look() view {
	v := view{readers: map[string]bool{}, dead: map[string]bool{}}
	switch got := w.server.do("GET", w.keys.Lock).(type) {
	case string:
		v.value = got
	case simAnswer:
		v.value, v.odd = "(a hash)", true
	}
	ms, _ := w.server.do("PTTL", w.keys.Lock).(int)
	v.left = time.Duration(ms) * time.Millisecond
	now := w.serverNow().UnixMilli()
	ends := w.scores(w.keys.Readers())
	for _, z := range ends {
		if int64(z.score) > now {
			v.readers[z.member] = true
		}
	}
	v.queue = w.queued()
	if len(v.queue) == 0 {
		return v
	}
	alive := map[string]bool{}
	for _, z := range w.scores(w.keys.Waiters()) {
		alive[z.member] = int64(z.score) > now
	}
	for _, id := range v.queue {
		v.dead[id] = !alive[id]
	}
	return v
}

type scored struct {
	member string
	score  float64
}

// scores returns a sorted set.
func (w *world) scores(key string) []scored {
	all, _ := w.server.do("ZRANGE", key, "0", "-1", "WITHSCORES").([]any)
	var some []scored
	for i := 0; i+1 < len(all); i += 2 {
		n, _ := strconv.ParseFloat(all[i+1].(string), 64)
		some = append(some, scored{all[i].(string), n})
	}
	return some
}

// queued returns the queue's ids in order, be it a list or a sorted set.
func (w *world) queued() []string {
	all, ok := w.server.do("LRANGE", w.keys.Queue(), "0", "-1").([]any)
	if !ok {
		all, _ = w.server.do("ZRANGE", w.keys.Queue(), "0", "-1").([]any)
	}
	var ids []string
	for _, id := range all {
		ids = append(ids, id.(string))
	}
	return ids
}

// changed notes whether a grant of ours ended without a word to the server.
func (w *world) changed(before, after view) {
	if after.cools() {
		w.cooled[after.value[strings.Index(after.value, ":"+protocol.FormatTag)+1:]] = true
	}
	for _, id := range w.owners {
		w.unclean = w.unclean || !before.owns(id)
	}
	w.owners = w.owners[:0]
	if strings.HasPrefix(after.value, protocol.FormatTag) && after.value != protocol.MarkerValue && !after.cools() {
		w.owners = append(w.owners, after.value)
	}
	w.owners = append(w.owners, sortedKeys(after.readers)...)
	w.intrude(after)
}

// intrude notes who is inside while another process owns the lock.
func (w *world) intrude(v view) {
	owner := func(id string, m protocol.Mode) {
		for _, c := range w.clients {
			if strings.Contains(id, ":"+c.id) {
				continue
			}
			for _, x := range c.calls {
				if x.Phase == lockstate.Inside && (m == protocol.Exclusive || x.Mode == protocol.Exclusive && !w.downgraded[x]) && w.intruded[x] == "" {
					w.intruded[x] = id
				}
			}
		}
	}
	if v.value == protocol.MarkerValue {
		for id := range v.readers {
			owner(id, protocol.Shared)
		}
	} else if v.value != "" && !v.cools() {
		owner(v.value, protocol.Exclusive)
	}
}

func (w *world) clientOf(id string) *simClient {
	for _, c := range w.clients {
		if strings.HasSuffix(id, ":"+c.id) {
			return c
		}
	}
	return nil
}

// cools reports that a minimum hold goes on although its lease was unlocked.
func (v *view) cools() bool {
	_, ok := protocol.ParseCooldown(v.value)
	return ok
}

func (v *view) owns(id string) bool {
	return v.value == id || v.value == protocol.MarkerValue && v.readers[id]
}

// compare checks what one script did: nobody's grant was touched but the
// caller's own, and the queue was served in order.
func (w *world) compare(before, after view, p *packet) {
	mine := map[string]bool{p.cmd.ID: true, p.cmd.Next: true, p.r.Req.ID: true}
	if p.g != nil {
		mine[p.g.ID] = true
	}
	owners := []string{before.value}
	if before.value == protocol.MarkerValue {
		owners = sortedKeys(before.readers)
	}
	if before.odd {
		owners = nil
	}
	for _, id := range owners {
		if id != "" && !mine[id] && !after.owns(id) {
			w.fail("%s of %s took the grant of %s", p.kind, p.c.name, short(id))
		}
	}
	if before.value != "" && before.value != protocol.MarkerValue && !mine[before.value] && after.left < before.left {
		if who, err := protocol.RequestOf(before.value); (err != nil || after.left != who.TTL) && !clamped(before.value, after.left) {
			w.fail("%s of %s shortened the lease of %s", p.kind, p.c.name, short(before.value))
		}
	}
	still := map[string]bool{}
	for _, id := range after.queue {
		if still[id] {
			w.fail("%s is queued twice", short(id))
		}
		still[id] = true
	}
	var got []string
	if after.value == protocol.MarkerValue {
		for _, id := range sortedKeys(after.readers) {
			if !before.readers[id] { // one whose marker was away was served before
				got = append(got, id)
			}
		}
	} else if strings.HasPrefix(after.value, protocol.FormatTag) && after.value != before.value && !after.cools() {
		got = append(got, after.value)
	}
	for _, id := range got {
		w.provisional(id, after, p)
		if before.dead[id] && id != p.cmd.ID && id != p.cmd.Next {
			w.fail("%s was served, whose waiting lease is over", short(id))
		}
		if c := w.clientOf(id); c != p.c && w.skipped(id) {
			w.fail("%s owns, but nobody listens", short(id))
		}
		if p.cmd.Verb == protocol.Downgrade && id == p.cmd.Next {
			continue // its process was owner before
		}
		for _, ahead := range before.queue {
			if ahead == id {
				break
			}
			if still[ahead] && !before.dead[ahead] {
				w.fail("%s was served before %s, who was queued ahead of it", short(id), short(ahead))
			}
		}
	}
}

// provisional checks for how long an id owns that was made owner by a message.
func (w *world) provisional(id string, v view, p *packet) {
	req, err := protocol.RequestOf(id)
	if err != nil || !req.Provisional || id == p.cmd.ID || id == p.cmd.Next {
		return
	}
	w.count("a provisional grant")
	left := v.left
	for _, z := range w.scores(w.keys.Readers()) {
		if req.Mode == protocol.Shared && z.member == id {
			left = time.UnixMilli(int64(z.score)).Sub(w.serverNow())
		}
	}
	if left > protocol.ProvisionalTTL {
		w.fail("%s owns for %v by a message", short(id), left)
	}
}

// served checks what every script must have seen to: nobody alive was dropped,
// and nobody waits for a free lock.
func (w *world) served(before, after view, p *packet, unfinished bool) {
	still := map[string]bool{}
	for _, id := range after.queue {
		still[id] = true
	}
	for _, id := range before.queue {
		if !before.dead[id] && !still[id] && !after.owns(id) && !w.skipped(id) && (p.kind != "cancel" || p.g.ID != id) {
			w.fail("%s was dropped from the queue alive", short(id))
		}
	}
	// Where another program's hash is in the key's place a cancel ends as if it had
	// found nothing: nobody can get the lock, and what waits is disowned later.
	if p.kind == "cancel" && !before.odd && (after.owns(p.g.ID) || still[p.g.ID]) {
		w.fail("%s outlived its cancel", short(p.g.ID))
	}
	looked := p.kind == "cancel" || p.kind == "request" && (p.cmd.Verb == protocol.Acquire) != before.owns(p.cmd.ID)
	// Of a long queue one call looks at so much; its answer has somebody go on at once,
	// or all would not be served in time.
	if !looked || len(after.queue) == 0 || before.odd || unfinished {
		return
	}
	head := after.queue[0]
	who, err := protocol.ParseID(head)
	switch {
	case err != nil:
	case after.dead[head] && after.value == before.value: // else it got there just now
		w.fail("dead %s is at the head of the queue", short(head))
	case after.value == "" && len(after.readers) == 0, after.value == protocol.MarkerValue && who.Mode == protocol.Shared:
		w.fail("%s waits for a free lock", short(head))
	}
}

// losses checks that no lease is given up without reason.
func (w *world) losses(c *simClient, before *lockstate.Status, fx *lockstate.Effects) {
	for _, l := range fx.Ended {
		if l.Why == lockstate.LostUnproved {
			continue // of a caller who left; what is held by now is another grant, or none
		}
		inTime := c.now().Before(before.Trust) && before.State == lockstate.Held && !before.Drifted(c.now())
		if inTime && !c.dead && !w.excuse(before.Req.ID) && !w.struck[before.Req.ID] && l.Why != lockstate.Overlong {
			if v := w.look(); v.owns(before.Req.ID) {
				w.fail("%s gave up %s, which it owns: %s", c.name, short(before.Req.ID), l.Why)
			}
		}
	}
}

// released checks each Unlock that returns without an error: what it let go of is
// free or somebody else's, unless others of its process go on with it.
func (w *world) released(c *simClient) {
	still := c.left[:0]
	for _, d := range c.left {
		if !d.caller.Settled {
			still = append(still, d)
			continue
		}
		w.promised(c, &d)
		if d.caller.Outcome() != nil {
			if errors.Is(d.caller.Outcome(), lockstate.ErrLeaseLost) {
				w.count("Unlock: lost")
			} else {
				w.count("Unlock: " + d.caller.Outcome().Error())
			}
			continue
		}
		w.count("Unlock: nil")
		// Foreign owners leave no token: one that came after the key was deleted, and went
		// before the cancel of a release without answer, is not seen (design.md §2,
		// Unlock). Nor is one between readers, whose leases stand beside the key: the next
		// reader's marker makes the others owners again. Nor is one after the last token was
		// forgotten: the answer *queued* behind it looks older than the grant then.
		who := w.intruded[d.caller]
		if !strings.HasPrefix(who, protocol.FormatTag) && (c.byToken || d.caller.Mode == protocol.Shared || w.forgot) {
			who = ""
		}
		// With another caller of the process going on, nothing was to be asked. And a late
		// copy of an acquire can own for its id after the keys were lost: then the release
		// finds its own id, and cannot know that another came in between.
		excused := false
		for _, id := range d.ids {
			excused = excused || c.status().MayOwn(id) || w.copied[id]
		}
		// Where the server forgot the lock's last token, and its clock went back, a message about
		// a grant that it forgot too is not known to be old, however late it comes.
		excused = excused || w.forgot && w.jumpedBack
		if who != "" && d.asked && !excused && w.has[intruders] {
			w.fail("%s: Unlock of token %d says nil, but %s owned while it was inside", c.name, d.caller.Token, short(who))
		}
		v := w.look()
		for _, id := range d.ids {
			if !c.status().MayOwn(id) && !w.copied[id] && v.owns(id) {
				w.fail("%s is told that %s was released, which owns", c.name, short(id))
			}
		}
	}
	c.left = still
}

func sortedKeys(m map[string]bool) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	for i := range keys { // few
		for j := i; j > 0 && keys[j] < keys[j-1]; j-- {
			keys[j], keys[j-1] = keys[j-1], keys[j]
		}
	}
	return keys
}

// believes reports whether x, who is inside, may take the lock for its own now.
func (c *simClient) believes(x *lockstate.Caller) bool {
	return x.Phase == lockstate.Inside && x.Ended == lockstate.NotYet && c.status().State == lockstate.Held && c.now().Before(c.status().Trust) && !c.drowsy()
}

// simTokensAhead is by how many µs a reader's token may be ahead of the server's
// clock. The server gives it the lock's last token + 1, and a reader does not wait for
// the clock, as a writer does: no store keeps its token. What the world does in 5 µs
// takes longer in ours.
const simTokensAhead = 5

// admitted checks a new lease's token and its place in its process' FIFO.
func (w *world) admitted(c *simClient, x *lockstate.Caller) {
	if !w.excuse(c.status().Req.ID) {
		w.entered(x)
	}
	if n := c.order[x]; n < c.lastIn {
		w.fail("%s admitted caller %d after %d", c.name, n, c.lastIn)
	} else {
		c.lastIn = n
	}
	if !c.now().Before(c.status().Trust) && x.ClockLead() == 0 {
		w.fail("%s let a caller in outside of the trust window", c.name)
	}
	if w.excuse(c.status().Req.ID) || !c.believes(x) || x.Token == 0 { // it may draw a token when it leaves
		return
	}
	clock := uint64(w.serverNow().UnixMicro())
	if x.Mode == protocol.Shared {
		clock += simTokensAhead
	}
	if w.has[tokensAhead] && w.has[rates] && !w.jumpedBack && x.Token > clock {
		w.fail("token %d of %s is %v ahead of the server's clock", x.Token, c.name, time.Duration(x.Token-clock)*time.Microsecond)
	}
	w.drew(c, x)
}

// drew checks the token that a caller was given.
func (w *world) drew(c *simClient, x *lockstate.Caller) {
	bound := w.topWriter
	if x.Mode == protocol.Exclusive {
		bound = w.top
	}
	// Who had the lock can have given out tokens that the server has not heard
	// of. They are behind its clock, unless that went back.
	apart := w.has[rates] && !w.has[tokensAhead]
	if x.Token <= bound && !((w.jumpedBack || apart) && w.unclean) {
		w.fail("token %d of %s is not above %d", x.Token, c.name, bound)
	}
	if x.Token >= 1<<53 {
		w.fail("token %d is too large", x.Token)
	}
	w.top = max(w.top, x.Token)
	if x.Mode == protocol.Exclusive {
		w.topWriter = max(w.topWriter, x.Token)
	}
}

// check is made after every step: at most one writer, and no reader beside it,
// among those who may believe that they own, accidents excepted by name.
func (w *world) check() {
	w.watchChecks()
	writers, readers := 0, 0
	who := ""
	for _, c := range w.clients {
		if c.dead {
			continue
		}
		if w.excuse(c.status().Req.ID) {
			w.overdue(c)
			continue
		}
		in := 0
		for _, x := range c.calls {
			if x.Phase != lockstate.Inside {
				continue
			}
			in++
			if x.Mode == protocol.Exclusive && in > 1 && !w.downgraded[x] {
				w.fail("%s has two inside", c.name)
			}
		}
		for _, x := range c.calls {
			if !c.believes(x) {
				continue
			}
			who += " " + c.name + ":" + strconv.FormatUint(x.Token, 10)
			if x.Mode == protocol.Exclusive && !w.downgraded[x] {
				writers++
			} else {
				readers++
				break
			}
		}
	}
	if w.foreign != "" && w.now.Before(w.foreignTill) {
		writers++
		who += " foreign"
	}
	if writers > 1 || writers == 1 && readers > 0 {
		w.fail("owners at once:%s", who)
	}
}

// excuse reports whether an accident took the grant, and its process cannot know.
func (w *world) excuse(id string) bool {
	_, ok := w.excused[id]
	return ok
}

// learned ends the excuse for a grant when Redis was asked about it after the
// accident, and its process hears the answer.
func (w *world) learned(id string, o protocol.Outcome, p *packet) {
	since, ok := w.excused[id]
	if !ok || !w.has[excuses] || p.sent.Before(since) {
		return
	}
	g := p.c.status()
	switch {
	case o == protocol.Granted && p.err == nil:
	case o == protocol.NotOurs && p.kind == "renewed" && !g.Downgrading && !p.r.At.Before(g.Proved):
	default:
		return
	}
	w.count("an excuse ends")
	w.struck[id] = true // a loss has had a reason nevertheless
	delete(w.excused, id)
}

// overdue checks that a process whose grant an accident took asks about it in time.
func (w *world) overdue(c *simClient) {
	g := c.status()
	since := w.excused[g.Req.ID]
	if since.Before(c.woke) {
		since = c.woke
	}
	limit := g.Req.TTL/3 + g.Req.TTL/300 + 10*time.Millisecond
	late := w.now.Sub(since) > limit && c.now().Sub(g.Since) > limit
	due := c.lock.Due().Time(c.Start()) // that alarm may be about to ring
	if w.has[excuses] && late && !c.paused && due.After(c.now()) && g.State == lockstate.Held && g.Renewed && c.asked.Before(since) {
		w.fail("%s has not asked about %s for %v after an accident", c.name, short(g.Req.ID), w.now.Sub(since))
	}
}

// accident excuses every grant there is: it was taken by what no lock can see.
func (w *world) accident(what string) {
	w.count("accident: " + what)
	w.logf("ACCIDENT: %s", what)
	w.unclean, w.accidentAt = true, w.now
	w.forgot = w.forgot || strings.HasPrefix(what, "the server")
	v := w.look()
	if v.value != "" {
		w.excused[v.value] = w.now
	}
	for id := range v.readers {
		w.excused[id] = w.now
	}
	for _, c := range w.clients {
		if c.status().State == lockstate.Held || c.status().State == lockstate.Releasing {
			w.excused[c.status().Req.ID] = w.now
		}
		for _, p := range w.wire { // told, but not yet heard
			if p.kind == "message" && p.m.Kind == "granted" {
				w.excused[p.m.ID] = w.now
			}
			if p.kind == "reply" && p.a.Outcome == protocol.Granted {
				w.excused[p.cmd.ID], w.excused[p.cmd.Next] = w.now, w.now
			}
		}
	}
	w.foreign = ""
}
