package simulation

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
)

// view is the state of the lock on the server.
type view struct {
	value   string
	odd     bool // the key has another type
	left    time.Duration
	readers map[string]bool
	queue   []string
	dead    map[string]bool // queued, but its waiting lease has expired
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

// queued returns the queue's ids in order, whether the queue is a list or a sorted set.
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

// changed notes whether a grant of ours ended other than by a script, such as by its TTL, and
// which requests were given back with a cool-down.
func (w *world) changed(before, after view) {
	if after.cools() {
		w.cooled[after.value[strings.Index(after.value, ":"+protocol.FormatTag)+1:]] = true
	}
	w.disowned(before)
	w.setOwners(after)
	w.intrude(after)
}

// disowned notes which requests have stopped owning the lock without a script about them.
func (w *world) disowned(v view) {
	for _, id := range w.owners {
		w.unclean = w.unclean || !v.owns(id)
		w.taken[id] = w.taken[id] || !v.owns(id)
	}
}

// lookAgain notes who owns the lock after something that was no script of a client.
func (w *world) lookAgain() view {
	v := w.look()
	w.disowned(v)
	w.setOwners(v)
	return v
}

// setOwners notes who owns the lock now.
func (w *world) setOwners(v view) {
	w.owners = w.owners[:0]
	if strings.HasPrefix(v.value, protocol.FormatTag) && v.value != protocol.MarkerValue && !v.cools() {
		w.owners = append(w.owners, v.value)
	}
	w.owners = append(w.owners, sortedKeys(v.readers)...)
}

// intrude notes which callers are inside while another process owns the lock.
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

// cools reports whether the lock is in a cool-down.
func (v *view) cools() bool {
	_, ok := protocol.ParseCooldown(v.value)
	return ok
}

func (v *view) owns(id string) bool {
	return v.value == id || v.value == protocol.MarkerValue && v.readers[id]
}

// compare checks what one script did: it touched no grant other than the caller's own, and
// it served the queue in order.
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
			if !before.readers[id] { // if it was there, it had been served before, and only the marker was missing
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
			continue // its process was already the owner
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

// provisional checks that an id that a message made the owner, and whose inbox no count can
// prove gone, owns for no longer than a provisional grant lasts.
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

// served checks what every script must achieve: no live request is dropped from the queue but by its own
// cancel, which the release of a grant in doubt is, and nobody waits for a free lock. A brief re-check changes nothing but its own waiting lease, and an owner's
// question changes nothing at all if its id does not own.
func (w *world) served(before, after view, p *packet, a protocol.Answer) {
	still := map[string]bool{}
	for _, id := range after.queue {
		still[id] = true
	}
	for _, id := range before.queue {
		if !before.dead[id] && !still[id] && !after.owns(id) && !w.skipped(id) && (p.kind != cancelPacket || p.g.ID != id) && (p.cmd.Proof == 0 || p.cmd.ID != id) {
			w.fail("%s was dropped from the queue alive", short(id))
		}
	}
	// While another program's hash is in the key's place, a cancel ends as if it had found nothing:
	// nobody can get the lock, and a request left in the queue is disowned later.
	if p.kind == cancelPacket && !before.odd && (after.owns(p.g.ID) || still[p.g.ID]) {
		w.fail("%s outlived its cancel", short(p.g.ID))
	}
	if a.Brief {
		if after.value != before.value || !slices.Equal(after.queue, before.queue) || !maps.Equal(after.readers, before.readers) {
			w.fail("the brief re-check of %s changed the owner or the queue", short(p.cmd.ID))
		} else if !still[p.cmd.ID] && !w.unqueued[p.cmd.ID] {
			w.fail("the brief re-check of %s says that it waits", short(p.cmd.ID))
		}
		return
	}
	looked := p.kind == cancelPacket || p.kind == requestPacket && (p.cmd.Verb == protocol.Acquire) != before.owns(p.cmd.ID)
	if who, _ := protocol.ParseID(p.cmd.ID); p.cmd.Question {
		looked = a.Outcome == protocol.Granted && who.Mode == protocol.Shared
		if a.Outcome != protocol.Granted && (after.value != before.value || !slices.Equal(after.queue, before.queue)) {
			w.fail("the question of %s, which does not own, changed the owner or the queue", short(p.cmd.ID))
		}
	}
	// One call examines only part of a long queue, and its answer makes its client continue at
	// once. Otherwise some waiters would not be served in time.
	if !looked || len(after.queue) == 0 || before.odd || a.Unfinished {
		return
	}
	head := after.queue[0]
	who, err := protocol.ParseID(head)
	switch {
	case err != nil:
	case after.dead[head] && after.value == before.value: // otherwise it has only just become the head
		if a.Outcome == protocol.Enqueued && a.Place >= 100 && p.cmd.Echo == "" {
			break // it leaves a dead head to those in front, see design.md, Long queues
		}
		w.fail("dead %s is at the head of the queue", short(head))
	case after.value == "" && len(after.readers) == 0, after.value == protocol.MarkerValue && who.Mode == protocol.Shared:
		w.fail("%s waits for a free lock", short(head))
	}
}

// losses checks that no lease is given up without a reason.
func (w *world) losses(c *simClient, before *lockstate.Status, fx *lockstate.Effects) {
	for _, l := range fx.Ended {
		if l.Why == lockstate.LostUnproved {
			continue // it concerns a caller that has left; by now another grant is held, or none
		}
		if l.Why == 0 {
			continue // the client was closed, and the caller keeps its lease, if only until its maximum hold ends
		}
		w.lostInTime(c, before, l.Why)
		inTime := c.now().Before(before.Trust) && before.State == lockstate.Held && !before.Drifted(c.now())
		if inTime && !c.dead && !w.excuse(before.Req.ID) && !w.struck[before.Req.ID] && l.Why != lockstate.Overlong {
			next := before.Downgrading && before.Next != "" && !w.copied[before.Next] && l.Why != lockstate.NotConfirmed // see lostInTime
			if v := w.look(); v.owns(before.Req.ID) || next && v.owns(before.Next) {
				w.fail("%s gave up %s, which it owns: %s", c.name, short(before.Req.ID), l.Why)
			}
		}
	}
}

// released checks each Unlock that returns without an error: the lock it gave back must be free
// or somebody else's, unless other callers of its process continue with it.
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
				w.lostAtRelease(c, &d)
			} else {
				w.count("Unlock: " + d.caller.Outcome().Error())
			}
			continue
		}
		w.count("Unlock: nil")
		// A foreign owner leaves no token. So one that came after the key was deleted, and left before
		// the cancel of an unanswered release, is not seen (design.md §2, Unlock). Neither is one that
		// came between readers, whose leases are kept beside the key: the next reader's marker makes
		// the others owners again. Neither is one that came after the last token was forgotten: the
		// answer *queued*, given behind such an owner, then looks older than the grant.
		who, shared := w.intruded[d.caller], d.caller.Mode == protocol.Shared
		for _, id := range d.ids {
			shared = shared || w.downgraded[d.caller] && w.lowered[id]
		}
		if !strings.HasPrefix(who, protocol.FormatTag) && (c.byToken || shared || w.forgot) {
			who = ""
		}
		// If another caller of the process continues with the grant, nothing had to be asked. And after
		// the keys were lost, a late copy of an acquire can make its id the owner again: the release
		// then finds its own id, and cannot know that another owner came in between. Neither can the
		// release of a reader that the writer with this id has become meanwhile.
		excused := false
		for _, id := range d.ids {
			excused = excused || c.status().MayOwn(id) || w.copied[id] || w.copied[w.writerOf[id]]
		}
		// If the server forgot the lock's last token and its clock went back, a message about a grant
		// that the server forgot, too, cannot be recognized as old, however late it comes.
		excused = excused || w.forgot && w.jumpedBack
		if who != "" && d.asked && !d.unused && !excused && w.has[intruders] {
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

// believes reports whether x is inside and may believe that it owns the lock now.
func (c *simClient) believes(x *lockstate.Caller) bool {
	return x.Phase == lockstate.Inside && x.Ended != lockstate.ByLoss && c.status().State == lockstate.Held && c.now().Before(c.status().Trust) && !c.drowsy()
}

// simTokensAhead is by how many µs a reader's token may be ahead of the server's clock. The
// server gives a reader the lock's last token + 1, and a reader does not wait for the clock
// as a writer does, because no store keeps its token. What happens in 5 µs of the world's
// time takes longer in reality.
const simTokensAhead = 5

// admitted checks the token of a new lease and its caller's place in the process's FIFO.
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
	if w.excuse(c.status().Req.ID) || !c.believes(x) || x.Token == 0 { // a caller without a token may draw one when it leaves
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

// highest returns what the server's clock would show had it never jumped back, as far as it matters: a client
// that holds the lock goes on by that clock, and its own may be fast, until a renewal is answered or its lease
// ends.
func (w *world) highest() time.Time {
	if w.high.IsZero() {
		return w.high
	}
	passed := min(w.now.Sub(w.highAt), w.longest)
	return w.high.Add(passed + passed/100)
}

// drew checks the token that a caller got.
func (w *world) drew(c *simClient, x *lockstate.Caller) {
	bound := w.topWriter
	if x.Mode == protocol.Exclusive {
		bound = w.top
	}
	// A former owner can have given out tokens that the server has not heard of. They are
	// behind the server's clock, unless the clock went back.
	apart := w.has[rates] && !w.has[tokensAhead]
	// Then a grant whose token is above all that the clock has shown before, or would show now, is above those
	// tokens, too.
	behind := w.jumpedBack && c.status().Token <= uint64(w.highest().UnixMicro())+simTokensAhead
	if x.Token <= bound && !((behind || apart) && w.unclean) {
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

// check runs after every step. Among the callers that may believe they own the lock, there is
// at most one writer, and no reader beside it. Grants taken by an accident are excused.
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
		w.paced(c)
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
			w.endsInTime(c, x)
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

// excuse reports whether an accident took the grant without its process being able to know.
func (w *world) excuse(id string) bool {
	_, ok := w.excused[id]
	return ok
}

// learned ends the excuse for a grant once its process hears an answer of Redis about the
// grant to a question that was sent after the accident.
func (w *world) learned(id string, o protocol.Outcome, p *packet) {
	since, ok := w.excused[id]
	if !ok || !w.has[excuses] || p.sent.Before(since) {
		return
	}
	g := p.c.status()
	switch {
	case o == protocol.Granted && p.err == nil:
	case o == protocol.NotOurs && p.kind == renewedPacket && !g.Downgrading && !p.r.At.Before(g.Proved):
	default:
		return
	}
	w.count("an excuse ends")
	w.struck[id] = true // a loss would still have a reason
	delete(w.excused, id)
}

// overdue checks that a process whose grant was taken by an accident asks about it in time.
func (w *world) overdue(c *simClient) {
	g := c.status()
	since := w.excused[g.Req.ID]
	if since.Before(c.woke) {
		since = c.woke
	}
	limit := g.Req.TTL/3 + g.Req.TTL/300 + 10*time.Millisecond
	late := w.now.Sub(since) > limit && c.now().Sub(g.Since) > limit
	due := c.lock.Due().Time(c.Start()) // an alarm that is due may be about to ring
	if w.has[excuses] && late && !c.paused && due.After(c.now()) && g.State == lockstate.Held && g.Renewed && c.asked.Before(since) {
		w.fail("%s has not asked about %s for %v after an accident", c.name, short(g.Req.ID), w.now.Sub(since))
	}
}

// accident excuses all existing grants: they were taken by something that no client can see.
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
		for _, p := range w.wire { // sent, but not yet received
			if p.kind == messagePacket && p.m.Kind == protocol.MessageGranted {
				w.excused[p.m.ID] = w.now
			}
			if p.kind == replyPacket && p.a.Outcome == protocol.Granted {
				w.excused[p.cmd.ID], w.excused[p.cmd.Next] = w.now, w.now
			}
		}
	}
	w.foreign = ""
}
