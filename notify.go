package leased

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	echoWait      = time.Second // without an echo for that long, the subscription is rebuilt
	confirmWait   = 2 * time.Second
	ownerSilence  = 20 * time.Second // an owner demands an echo after that long
	firstRejoin   = 20 * time.Millisecond
	longestRejoin = 2 * time.Second
	deniedRejoin  = 30 * time.Second
)

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

	mu     sync.Mutex // guards what follows; only watchdog.mu is locked under it
	state  inboxState
	sub    *redis.PubSub
	broken bool      // sub is to be rebuilt
	heard  time.Time // last sign of life
	nonce  string    // of the echo awaited, "" if none is
	count  int
}

type inboxState uint8

const (
	joining inboxState = iota
	joined
	forbidden // Redis does not let us subscribe: waiting means polling
)

func newInbox(c *Client, rdb redis.UniversalClient) *inbox {
	in := &inbox{client: c, rdb: rdb, channel: inboxChannel(c.opts.prefix, c.id)}
	in.quit, in.halt = context.WithCancel(context.Background())
	in.alarm.owner = in
	return in
}

func (in *inbox) is(s inboxState) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.state == s
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
	pause := firstRejoin
	for in.quit.Err() == nil {
		err := in.listen()
		if in.was(joined) {
			pause = firstRejoin
		}
		if forbids(err) {
			in.enter(forbidden)
			in.client.journal.deaf(err)
			pause = deniedRejoin
		}
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
		pause = min(2*pause, longestRejoin)
	}
}

// was reports whether the state is s, and if so ends it.
func (in *inbox) was(s inboxState) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.state != s {
		return false
	}
	in.state = joining
	return true
}

func (in *inbox) enter(s inboxState) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.state, in.heard, in.nonce = s, time.Now(), ""
}

// forbids reports whether Redis refuses the subscription itself.
func forbids(err error) bool {
	return err != nil && (redis.HasErrorPrefix(err, "NOPERM") || strings.Contains(err.Error(), "no permissions to access"))
}

// listen subscribes and hands messages on until the subscription breaks. It
// never calls Redis for them and never blocks: a subscriber that does not read
// holds up the server.
func (in *inbox) listen() error {
	sub := in.rdb.Subscribe(in.quit)
	defer sub.Close()
	in.mu.Lock()
	in.sub, in.broken = sub, false
	in.mu.Unlock()
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
			return err
		}
		switch got := got.(type) {
		case *redis.Subscription:
			in.enter(joined)
			in.settled.Store(true)
			for _, e := range in.client.entries() {
				e.step(e.lock.subscribed)
			}
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
	in.mu.Lock()
	in.heard = time.Now()
	in.mu.Unlock()
	m, ok := parseMessage(text)
	if !ok {
		c.crew.start(func() { c.journal.garbage(text) })
		return
	}
	if m.kind == "echo" {
		in.mu.Lock()
		if m.nonce == in.nonce {
			in.nonce = ""
		}
		in.mu.Unlock()
		return
	}
	if who, err := parseID(m.id); err != nil || who.client != c.id {
		c.crew.start(func() { c.journal.garbage(text) })
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

// challenge returns the nonce of an echo that a re-check should ask for, or ""
// if there is no need: the inbox gave a sign of life just now, or an echo is
// awaited already.
func (in *inbox) challenge(now time.Time, silence time.Duration) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.state != joined || in.nonce != "" || now.Sub(in.heard) < silence {
		return ""
	}
	in.count++
	in.nonce = strconv.Itoa(in.count)
	return in.nonce
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
	defer in.mu.Unlock()
	switch {
	case in.nonce != nonce: // it came already
	case receivers < 0: // it was not published
		in.nonce = ""
	case receivers == 0 && in.client.counts: // nobody heard it
		in.client.dog.set(&in.alarm, time.Now())
	default:
		in.client.dog.set(&in.alarm, time.Now().Add(echoWait))
	}
}

// ring: an echo was awaited for long enough.
func (in *inbox) ring(_ time.Time, batch []renewal) []renewal {
	in.mu.Lock()
	lost := in.nonce != ""
	in.nonce = ""
	in.mu.Unlock()
	if lost {
		// Closing a subscription can wait for its dialling, and a logger for
		// anything: the watchdog waits for neither.
		in.client.crew.start(func() {
			in.client.journal.silent()
			in.rebuild()
		})
	}
	return batch
}

// suspect: a command failed with err. If the network broke, the subscription may
// have broken with it, so it has to prove its life with the next re-check.
func (in *inbox) suspect(err error) {
	if definite(err) {
		return
	}
	in.mu.Lock()
	in.heard, in.nonce = time.Time{}, ""
	in.mu.Unlock()
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
