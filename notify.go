package leased

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const confirmWait = 2 * time.Second

// inbox is the one subscription through which a client hears from Redis and
// other processes: granted, wanted, revoked, and echoes of its own. Messages can
// be lost, so each confirmation of the subscription has every waiting lock look
// again. A connection whose peer vanished looks alive for very long; so re-checks
// have the server publish an echo, and where none comes the subscription is
// built anew.
type inbox struct {
	client  *Client
	rdb     redis.UniversalClient
	channel string
	alarm   alarm
	quit    context.Context
	halt    context.CancelFunc
	settled atomic.Bool // the first subscription was confirmed, or failed

	mu      sync.Mutex // guards what follows; only watchdog.mu is locked under it
	hearing hearing
	sub     *redis.PubSub
	broken  bool // sub is to be rebuilt
}

func newInbox(c *Client, rdb redis.UniversalClient) *inbox {
	in := &inbox{client: c, rdb: rdb, channel: inboxChannel(c.opts.prefix, c.id), hearing: hearing{counts: c.counts}}
	in.quit, in.halt = context.WithCancel(context.Background())
	in.alarm.owner = in
	return in
}

func (in *inbox) is(s inboxState) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.hearing.state == s
}

func (in *inbox) confirmed() bool { return in.is(joined) }
func (in *inbox) denied() bool    { return in.is(forbidden) }

// run is the inbox: owned by the client, ended by halt, waited for by Close.
func (in *inbox) run() {
	// Receive ends on Close only, not with a context.
	closed := make(chan struct{})
	stop := context.AfterFunc(in.quit, func() {
		defer close(closed)
		in.rebuild()
	})
	defer func() {
		if !stop() {
			<-closed
		}
	}()
	for in.quit.Err() == nil {
		if refusal := in.attempt(); refusal != nil && !in.denied() {
			in.client.journal.deaf(refusal)
			in.enter(forbidden)
		}
		in.mu.Lock()
		pause := in.hearing.over(time.Now())
		in.mu.Unlock()
		if in.settled.CompareAndSwap(false, true) {
			for _, e := range in.client.entries() {
				e.step(e.lock.messageless)
			}
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-in.quit.Done():
			timer.Stop()
		}
	}
}

// enter: the subscription is confirmed, or refused. Every lock looks again: with
// the one messages may have been missed, with the other none will come.
func (in *inbox) enter(s inboxState) {
	in.mu.Lock()
	in.hearing.enter(s, time.Now())
	in.mu.Unlock()
	in.settled.Store(true)
	for _, e := range in.client.entries() {
		e.step(e.lock.subscribed)
	}
}

// notSubscribed is an answer of the server to SUBSCRIBE that is no confirmation.
type notSubscribed struct{ error }

func (r notSubscribed) Unwrap() error { return r.error }

// forbids reports whether Redis refuses the subscription itself, by an ACL, or as a
// proxy does that does not know it. What passes by itself is no refusal, and no lack
// of a connection is one.
func forbids(err error) bool {
	if err == nil {
		return false
	}
	if redis.HasErrorPrefix(err, "NOPERM") || strings.Contains(err.Error(), "no permissions to access") {
		return true
	}
	var refused notSubscribed
	if !errors.As(err, &refused) {
		return false
	}
	for _, passing := range [...]string{"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"} {
		if redis.HasErrorPrefix(refused.error, passing) {
			return false
		}
	}
	return true
}

// attempt listens for as long as that goes well, and returns what refused the
// subscription, if something did. Dialling calls code of the user's, which may panic,
// and so may the errors it makes.
func (in *inbox) attempt() (refusal error) {
	sub := in.rdb.Subscribe(in.quit)
	returned := false
	defer func() {
		if !returned { // then nobody is to close it: go-redis may have left it locked
			in.mu.Lock()
			in.sub = nil
			in.mu.Unlock()
		}
	}()
	defer in.client.survive("a hook of the Redis client, or an error of one,")
	in.mu.Lock()
	in.sub, in.broken = sub, false
	in.mu.Unlock()
	err := in.listen(sub)
	if forbids(err) {
		refusal = err
	}
	_ = sub.Close()
	returned = true
	return refusal
}

// listen subscribes and hands messages on until the subscription breaks. It
// never calls Redis for them and never blocks: a subscriber that does not read
// holds up the server.
func (in *inbox) listen(sub *redis.PubSub) error {
	// Whoever halts the inbox closes the subscription it finds here; one made
	// too late for that is refused its connection.
	if err := sub.Subscribe(in.quit, in.channel); err != nil {
		return err
	}
	for in.quit.Err() == nil {
		// The confirmation has to come soon; messages come when they come.
		patience := confirmWait
		if in.confirmed() {
			patience = 0
		}
		got, err := sub.ReceiveTimeout(in.quit, patience)
		if err != nil {
			if patience > 0 && definite(err) {
				return notSubscribed{err}
			}
			return err
		}
		switch got := got.(type) {
		case *redis.Subscription:
			in.enter(joined)
		case *redis.Message:
			in.receive(got.Payload)
		}
		in.mu.Lock()
		broken := in.broken
		in.mu.Unlock()
		if broken {
			return errors.New("leased: no echo from the server")
		}
	}
	return nil
}

// receive hands one message to the lock it is about. A request of ours that no
// lock knows is cancelled: that ends what a late copy of a command had begun.
func (in *inbox) receive(text string) {
	c := in.client
	m, ok := parseMessage(text)
	in.mu.Lock()
	in.hearing.message(m.nonce, time.Now())
	in.mu.Unlock()
	if !ok {
		c.journal.garbage(text)
		return
	}
	if m.kind == "echo" {
		return
	}
	if who, err := parseID(m.id); err != nil || who.client != c.id {
		c.journal.garbage(text)
		return
	}
	if e := c.lookup(m.key); e != nil {
		e.step(func(now time.Time, fx *effects) { e.lock.receive(&m, now, fx) })
		return
	}
	name, ok := strings.CutPrefix(m.key, c.opts.prefix)
	if k, err := newKeys(c.opts.prefix, name); ok && err == nil && (m.kind == "granted" || m.kind == "wanted") {
		c.reaper.add(&ghost{keys: &k, id: m.id})
	}
}

// challenge returns the nonce of an echo that a command should ask for, or "" if
// there is no need.
func (in *inbox) challenge(now time.Time, silence time.Duration) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.broken {
		return ""
	}
	nonce := in.hearing.challenge(now, silence)
	if nonce != "" {
		in.client.dog.set(&in.alarm, in.hearing.due)
	}
	return nonce
}

// prove has the inbox prove its life while its client owns locks, as re-checks do
// while it waits: an owner that is deaf would not hear that it is wanted.
func (in *inbox) prove(ctx context.Context) {
	nonce := in.challenge(time.Now(), ownerSilence)
	if nonce == "" {
		return
	}
	n, err := in.client.server.echo(ctx, in.channel, nonce)
	if err != nil {
		n = noEcho
	}
	in.challenged(nonce, n)
}

// challenged: the server has published the echo to so many receivers.
func (in *inbox) challenged(nonce string, receivers int) {
	in.mu.Lock()
	deaf := in.hearing.published(nonce, receivers, time.Now())
	if due := in.hearing.due; !deaf && !due.IsZero() {
		in.client.dog.set(&in.alarm, due)
	}
	in.mu.Unlock()
	if deaf {
		in.silent()
	}
}

// ring: an echo was awaited for long enough, unless it came or the alarm was moved.
func (in *inbox) ring(now time.Time, batch []renewal) []renewal {
	in.mu.Lock()
	lost := in.hearing.overdue(now)
	in.mu.Unlock()
	if lost {
		in.silent()
	}
	return batch
}

// silent has the subscription made anew, for it proved deaf. Closing one can wait
// for its dialling: the watchdog and a command's caller wait for neither.
func (in *inbox) silent() {
	in.mu.Lock()
	sub := in.sub
	again := in.broken || sub == nil
	in.broken = true
	in.mu.Unlock()
	if !again {
		in.client.journal.silent()
		in.client.crew.start(func() { sub.Close() }) // ends Receive
	}
}

// suspect: a command failed, so the subscription has to prove its life with the next
// command that can ask for it; unless Redis itself said that it refuses us.
func (in *inbox) suspect(fail *failure) {
	if fail.lasts() {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.hearing.suspect()
}

// rebuild breaks the subscription; run makes another.
func (in *inbox) rebuild() {
	in.mu.Lock()
	sub := in.sub
	in.broken = true
	in.mu.Unlock()
	if sub != nil {
		sub.Close() // ends Receive
	}
}
