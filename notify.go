package leased

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

const (
	// confirmWait is how long a server has for each step of a subscription but dialing, and how long dialing
	// takes before it counts as an attempt that failed, although it goes on.
	confirmWait = 2 * time.Second
	// maxDialing is how much more time dialing has, even if DialTimeout is longer: that no subscription can be
	// made is logged only between attempts.
	maxDialing = 10 * time.Second
	// backWait is how long dialing that has taken confirmWait goes on once Redis answers again.
	backWait = 500 * time.Millisecond
	// failsLong is how long attempts to subscribe fail before that is logged: longer than most
	// restarts and failovers.
	failsLong = 10 * time.Second
)

// inbox is the one subscription through which a client receives messages from Redis and other
// processes: granted, wanted, unwanted, ends, revoked, and its own echoes. Messages can be lost, so each
// time the subscription is confirmed, every waiting lock re-checks. A connection whose peer has
// vanished looks alive for a very long time, so re-checks have the server publish an echo, and if
// none arrives, the subscription is rebuilt.
//
// published, askAgain, startProbe, probe and requireProbe do nothing if the inbox is nil, as Client.alone is
// on a quorum. startProbe starts no probe then, so there is none to be sent.
type inbox struct {
	alarm
	client  *Client
	at      redisserver.Deployment
	channel string
	place   int // the number of its server in a quorum

	quit    context.Context
	halt    context.CancelFunc
	began   atomic.Bool   // a lock was asked for, so run has begun
	denied  atomic.Bool   // scripts may not publish on its server, according to the last answer that said
	asked   atomic.Int64  // when it was last asked whether they may, in ns since Client.began; 0 if never
	settled atomic.Bool   // the first subscription was confirmed, or failed
	hasten  chan struct{} // has run make the next attempt at once; of capacity 1

	mu      sync.Mutex // guards what follows; only watchdog.mu is locked under it
	hearing lockstate.InboxHealth
	sub     *redis.PubSub
	cut     context.CancelFunc // ends the dialing of sub
	broken  bool               // sub is to be rebuilt
	node    string             // the node of a Cluster at which sub was made; written by run only
	late    time.Time          // when the dialing of sub counts as having failed; zero while none is under way
	hangUp  context.CancelFunc // ends the dialing of sub, and nothing else; nil while none is under way

	patient bool // in a Cluster, the next dialing has all the time it needs; used by run only
}

func newInbox(c *Client, at redisserver.Deployment) *inbox {
	in := &inbox{client: c, at: at, channel: protocol.InboxChannel(c.opts.prefix, c.id), hasten: make(chan struct{}, 1), hearing: lockstate.InboxHealth{Counts: c.proof == protocol.Counted}}
	in.quit, in.halt = context.WithCancel(context.Background())
	return in
}

func (in *inbox) is(s lockstate.InboxState) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.hearing.State == s
}

func (in *inbox) refused() bool { return in.is(lockstate.Forbidden) }

// confirmed reports whether the subscription was confirmed, and is not known to have broken since.
func (in *inbox) confirmed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.hearing.State == lockstate.Joined && !in.broken
}

// failing returns for how long attempts to subscribe have failed or been refused.
func (in *inbox) failing(now time.Time) time.Duration {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.hearing.Failing(now)
}

// polls reports whether waiters have to poll: the subscription was refused or has failed for long, or
// nothing may be published to it.
func (in *inbox) polls() bool {
	if in.denied.Load() {
		return true
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.hearing.Polls()
}

// published notes what an answer says of publishing; see protocol.Answer.Published. In a Cluster, an echo
// may count no receiver although it arrives.
func (in *inbox) published(receivers int) {
	switch {
	case in == nil:
	case receivers == protocol.EchoDenied:
		in.denied.Store(true)
		in.client.log.publishDenied(in.server())
	case receivers >= 0:
		in.denied.Store(false)
	}
}

// askAgain asks the server that has the lock once more whether scripts may publish, if they may not, and at most
// every 20 s: a client for whose locks nobody waits sends no other command that would tell. Its goroutine is owned
// by the client, ended by the answer or the command's timeout, and waited for by Shutdown.
func (in *inbox) askAgain(k *protocol.Keys) {
	if in == nil || !in.denied.Load() {
		return
	}
	last, now := in.asked.Load(), time.Since(in.client.began)
	if last != 0 && now-time.Duration(last) < lockstate.OwnerSilence || !in.asked.CompareAndSwap(last, int64(now)) {
		return
	}
	in.mu.Lock()
	in.hearing.RequireProbe()
	in.mu.Unlock()
	in.client.group.start(func() {
		unlabeled()
		defer in.client.recoverPanic("a hook of the Redis client")
		in.probe(in.client.commandContext(nil), k)
	})
}

// server returns which server of a quorum the inbox subscribes to.
func (in *inbox) server() serverName {
	if in.client.quorum == nil {
		return serverName{}
	}
	return serverName{in.place + 1, in.at.Addr()}
}

// reach says how messages of other processes reach this client.
func (in *inbox) reach() inboxReach {
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.hearing.Polls() || in.denied.Load():
		return inboxPolling
	case in.hearing.State == lockstate.Joined:
		return inboxSubscribed
	case in.began.Load():
		return inboxConnecting
	}
	return inboxUnused
}

// run is the inbox's goroutine: owned by the client, ended by halt, waited for by Shutdown. If user
// code ends it, as testing.T.FailNow does, another goroutine continues.
func (in *inbox) run() {
	unlabeled()
	in.began.Store(true)
	over := false
	defer func() {
		if !over {
			in.client.group.start(in.runAgain) // or the client is closed, and so is its inbox
		}
	}()
	// Receive ends only on Close, not with a context.
	closed := make(chan struct{})
	stop := context.AfterFunc(in.quit, func() {
		defer close(closed)
		in.end()
	})
	defer func() {
		if !stop() {
			<-closed
		}
	}()
	for in.quit.Err() == nil {
		refused, err := in.attempt()
		in.pause(in.attemptEnded(refused, err))
	}
	over = true
}

var errInboxEnded = errors.New("leased: a hook of the Redis client ended its goroutine")

// runAgain is the goroutine of an inbox whose goroutine was ended in an attempt.
func (in *inbox) runAgain() {
	in.pause(in.attemptEnded(false, errInboxEnded))
	in.run()
}

// attemptEnded notes how an attempt ended, and returns the pause before the next one.
func (in *inbox) attemptEnded(refused bool, err error) (pause time.Duration) {
	if refused && !in.refused() {
		in.client.log.subscribeDenied(in.server(), err)
		in.enter(lockstate.Forbidden)
	}
	in.client.slotMap.reload() // the node may have left its Cluster
	now := time.Now()
	in.mu.Lock()
	polled := in.hearing.Polls()
	pause = in.hearing.Over(now)
	polls := in.hearing.Polls() && !polled
	in.mu.Unlock()
	// Of a quorum, the server whose subscription left fewer than a majority says why, not one that has been
	// dead all along. A refusal, and a Redis client that was closed, have lines of their own.
	failing := in.client.inbox.failing(now)
	if err != nil && failing >= failsLong && in.failing(now) == failing && !in.refused() && !errors.Is(err, redis.ErrClosed) {
		in.client.log.subscribeFailed(err)
	}
	in.attemptFailed(polls)
	return pause
}

// attemptFailed tells the locks of an attempt that failed. polls is whether waiters have to poll from now on.
func (in *inbox) attemptFailed(polls bool) {
	news := in.settle()
	switch {
	case polls:
		in.recheckAll()
	case news:
		in.client.stepAll((*lockstate.Lock).SubscribeFailed)
	}
}

// dialsLong is called by the watchdog, each confirmWait while an attempt goes on dialing. Callers wait for
// their first subscription, and waiters for messages, no longer than if the attempt had failed.
func (in *inbox) dialsLong(now time.Time) {
	in.mu.Lock()
	if in.late.IsZero() {
		in.mu.Unlock()
		return
	}
	isLate := !now.Before(in.late)
	polled := in.hearing.Polls()
	next := in.late
	if isLate {
		in.hearing.Late(now)
		next = now.Add(confirmWait)
	}
	polls := in.hearing.Polls() && !polled
	in.client.watchdog.set(in, next)
	in.mu.Unlock()
	if isLate {
		in.attemptFailed(polls)
	}
}

// pause waits for d, or until redisIsBack or halt is called.
func (in *inbox) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-in.hasten:
	case <-in.quit.Done():
	}
}

// redisIsBack has the inbox subscribe at once, unless it has. Otherwise its attempts would pause for up to
// 2 s more, in which waiters poll. Dialing that began in the outage may not notice that it is over, and is
// ended, but not at once: it may take as long as that of the connection on which Redis has just answered. One that
// has just begun has its first confirmWait.
func (in *inbox) redisIsBack() {
	if in.confirmed() {
		return
	}
	in.mu.Lock()
	hangUp, soon := in.hangUp, max(backWait, time.Until(in.late))
	in.mu.Unlock()
	if hangUp != nil {
		time.AfterFunc(soon, hangUp) // which does nothing once the dialing is over
	}
	select {
	case in.hasten <- struct{}{}:
	default:
	}
}

// enter is called when the subscription is confirmed or refused. Every lock re-checks: if it was
// confirmed, messages may have been missed before; if it was refused, none will come. On a quorum, a
// subscription that is made again concerns the requests at its own server only.
func (in *inbox) enter(s lockstate.InboxState) {
	in.mu.Lock()
	again := s == lockstate.Joined && in.hearing.State != lockstate.Forbidden && in.client.inbox.settled()
	in.hearing.Enter(s, time.Now())
	in.mu.Unlock()
	in.settle()
	if again && in.client.quorum != nil {
		in.rejoined()
		return
	}
	in.recheckAll()
}

// recheckAll has every lock of the client re-check.
func (in *inbox) recheckAll() {
	in.client.stepAll((*lockstate.Lock).Subscribed)
}

// notSubscribed is an answer of the server to SUBSCRIBE that does not confirm it.
type notSubscribed struct{ error }

func (r notSubscribed) Unwrap() error { return r.error }

// forbids reports whether Redis refuses the subscription itself: by an ACL, or as a proxy does that
// does not know SUBSCRIBE. A temporary condition is no refusal, and neither is a missing
// connection.
func forbids(err error) bool {
	if redis.HasErrorPrefix(err, "NOPERM") {
		return true
	}
	var refused notSubscribed
	return errors.As(err, &refused) && !redisserver.Passes(refused.error)
}

// newSubscription returns a subscription that has no channel yet. In a Cluster, every node passes
// on what is published at any other. go-redis uses the node that serves the channel's slot, and
// continues to use it even if it is dead or frozen and no replica takes its place. So each
// subscription is made at a different master from the one before.
func (in *inbox) newSubscription(life context.Context) *redis.PubSub {
	if in.at.Masters != nil {
		if node := in.otherMaster(); node != nil {
			in.setNode(node.Options().Addr)
			return subscriptionAt(life, node)
		}
	}
	in.setNode("")
	if in.at.Own != nil {
		return subscriptionAt(life, in.at.Own)
	}
	return in.at.Rdb.Subscribe(life)
}

// subscriptionAt returns a subscription at one server. While go-redis waits for the greeting of a new
// connection, which it does for ReadTimeout, whatever the context, nothing can close the subscription.
func subscriptionAt(life context.Context, one *redis.Client) *redis.PubSub {
	if t := one.Options().ReadTimeout; t == 0 || t > protocol.CommandTimeout { // 0: -1 was set, for no limit
		one = one.WithTimeout(protocol.CommandTimeout)
	}
	return one.Subscribe(life)
}

func (in *inbox) setNode(addr string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.node = addr
}

// otherMaster returns nil if it finds no other master: there may be none, or no answer. Asking for
// the slots dials, which calls user code.
func (in *inbox) otherMaster() *redis.Client {
	defer in.client.recoverPanic("MasterForKey of the Redis client")
	key := in.channel
	for range 10 { // the key of another master is found by chance
		node, err := in.at.Masters.MasterForKey(in.quit, key)
		if err != nil {
			return nil
		}
		if node.Options().Addr != in.node {
			return node
		}
		key = in.channel + strconv.FormatUint(rand.Uint64(), 36)
	}
	return nil
}

// attempt listens for as long as that goes well. It returns whether Redis refused the subscription, and the
// error that ended it. Making the subscription calls user code, if the Redis client is a type of the
// user's, and so does dialing. It may panic or end the goroutine, and so may the errors that it makes.
func (in *inbox) attempt() (refused bool, err error) {
	returned := false
	defer func() {
		if !returned { // then nothing may close it: go-redis may have left it locked
			in.mu.Lock()
			in.sub = nil
			in.mu.Unlock()
		}
	}()
	defer in.client.recoverPanic("a hook of the Redis client, or an error of one,")
	life, cut := context.WithCancel(in.quit)
	defer cut()
	sub := in.newSubscription(life)
	in.mu.Lock()
	in.sub, in.cut, in.broken = sub, cut, false
	in.mu.Unlock()
	err = in.listen(life, sub)
	refused = forbids(err)
	_ = sub.Close()
	returned = true
	return refused, err
}

// listen subscribes, and hands messages on until the subscription breaks or its life ends. Handing them on
// never calls Redis and never blocks: a subscriber that does not read holds up the server.
func (in *inbox) listen(life context.Context, sub *redis.PubSub) error {
	// Whoever halts the inbox closes the subscription that is stored in it; a subscription that is
	// made too late for that is refused its connection.
	if err := in.subscribe(life, sub); err != nil {
		return err
	}
	for life.Err() == nil {
		got, err := in.next(life, sub)
		if err != nil {
			return err
		}
		switch got := got.(type) {
		case *redis.Subscription:
			if in.refused() {
				in.client.log.subscribed(in.server())
			}
			in.enter(lockstate.Joined)
		case *redis.Message:
			in.receive(got.Payload)
		}
	}
	return errors.New("leased: no echo from the server")
}

// subscribe dials and sends SUBSCRIBE. Dialing has as long as that of the connections for commands: a host
// name may have several addresses, and Go gives the first one at least 2 s, so that with less time the
// second would never be tried. A frozen server accepts connections and answers nothing; its greeting is
// bounded by subscriptionAt.
//
// In a Cluster, a master that cannot be reached should not hold up the subscription that another one would
// accept. So there an attempt has time to dial only if the one before, at another master, had too little.
func (in *inbox) subscribe(life context.Context, sub *redis.PubSub) error {
	limit := confirmWait
	if in.at.Masters == nil || in.patient {
		limit += min(max(in.at.DialTimeout, 0), maxDialing)
	}
	ctx, cancel := context.WithTimeout(life, limit)
	defer cancel()
	in.mu.Lock()
	in.late, in.hangUp = time.Now().Add(confirmWait), cancel
	if limit > confirmWait {
		in.client.watchdog.set(in, in.late)
	}
	in.mu.Unlock()
	defer func() { // even if a dialer panics or ends the goroutine
		in.mu.Lock()
		in.late, in.hangUp = time.Time{}, nil
		in.mu.Unlock()
	}()
	err := sub.Subscribe(ctx, in.channel)
	in.patient = !in.patient && err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded)
	return err
}

// next returns what the server sends next. The confirmation has to come soon; messages may come at any time.
// If the connection breaks, go-redis dials again before it returns the error, and only the context bounds
// that: confirmWait before the confirmation, since the attempt ends anyway, and after it the subscription's
// life, which a missing echo ends.
func (in *inbox) next(life context.Context, sub *redis.PubSub) (any, error) {
	forever := time.Duration(0)
	if in.at.ReadTimeout < 0 { // connections know no deadlines
		forever = -1
	}
	if in.is(lockstate.Joined) {
		return sub.ReceiveTimeout(life, forever)
	}
	ctx, cancel := context.WithTimeout(life, confirmWait)
	defer cancel()
	soon := confirmWait
	if in.at.ReadTimeout < 0 {
		soon = forever
		defer time.AfterFunc(confirmWait, func() { in.leave() }).Stop()
	}
	got, err := sub.ReceiveTimeout(ctx, soon)
	if redisserver.IsServerReply(err) {
		err = notSubscribed{err}
	}
	return got, err
}

// receive delivers a message from the server, if it is for this client. Those of a quorum's servers are
// combined into one first.
func (in *inbox) receive(text string) {
	c := in.client
	m, ok := protocol.ParseMessage(text)
	in.mu.Lock()
	in.hearing.Message(m.Nonce, time.Now())
	in.mu.Unlock()
	if !ok {
		c.log.garbage(text)
		return
	}
	if m.Kind == protocol.MessageEcho {
		return
	}
	if who, err := protocol.ParseID(m.ID); err != nil || who.Client != c.id {
		c.log.garbage(text)
		return
	}
	if c.quorum != nil {
		in.receiveOfQuorum(&m)
		return
	}
	c.deliver(&m)
}

// deliver hands a message to the lock that it is about. A request of ours that no lock knows is
// canceled, which ends what a late copy of a command had begun.
func (c *Client) deliver(m *protocol.Message) {
	if e := c.lookup(m.Key); e != nil {
		e.step(func(now time.Time, fx *lockstate.Effects) { e.stateLocked().Receive(m, now, fx) })
		return
	}
	owns := m.Kind == protocol.MessageGranted || m.Kind == protocol.MessageWanted && c.quorum == nil // a quorum's also tells a waiter to ask
	if k, ok := c.keysOfLock(m.Key); owns && ok {
		c.canceler.add(&lockstate.Cancellation{Owner: k, ID: m.ID})
	}
}

// keysOfLock returns the keys of the lock whose main key is key.
func (c *Client) keysOfLock(key string) (*protocol.Keys, bool) {
	name, ok := strings.CutPrefix(key, c.opts.prefix)
	k, err := protocol.NewKeys(c.opts.prefix, name)
	return &k, ok && err == nil
}

// startProbe returns the nonce of an echo that a command should ask for, or "" if no echo is
// needed.
func (in *inbox) startProbe(now time.Time, silence time.Duration) string {
	if in == nil {
		return ""
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.broken {
		return ""
	}
	nonce := in.hearing.StartProbe(now, silence)
	if nonce != "" {
		in.client.watchdog.set(in, in.hearing.Due)
	}
	return nonce
}

// probe makes the inbox prove that it is alive while its client owns locks, as re-checks do while
// the client waits: an owner with a deaf inbox would not hear that its lock is wanted.
//
// The server of one of those locks publishes the echo: in a Cluster, another node may be cut off
// together with the inbox, and would deliver to the inbox what it publishes itself.
func (in *inbox) probe(ctx context.Context, k *protocol.Keys) {
	nonce := in.startProbe(time.Now(), lockstate.OwnerSilence)
	if nonce == "" {
		return
	}
	began := in.client.metrics.startTiming(ctx)
	n, err := in.client.server.Echo(ctx, k, in.channel, nonce)
	in.client.metrics.recordCommand(ctx, commandEcho, began.elapsed(), redisserver.Classify(err))
	if err != nil {
		n = protocol.NoEcho
	}
	in.published(n)
	in.probeSent(nonce, n)
}

// probeSent notes that the server has published the echo to that number of receivers.
func (in *inbox) probeSent(nonce string, receivers int) {
	in.mu.Lock()
	deaf := in.hearing.ProbeCounted(nonce, receivers, time.Now())
	if due := in.hearing.Due; !deaf && !due.IsZero() {
		in.client.watchdog.set(in, due)
	}
	in.mu.Unlock()
	if deaf {
		in.silent()
	}
}

// fire is called when the wait for an echo is over, or dialing takes long. The subscription has failed
// unless the echo came, or the alarm was moved.
func (in *inbox) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	in.mu.Lock()
	lost := in.hearing.Overdue(now)
	in.mu.Unlock()
	if lost {
		in.silent()
	}
	in.dialsLong(now)
	return batch
}

// silent rebuilds the subscription, which proved deaf.
func (in *inbox) silent() {
	if in.leave() {
		in.client.log.noEcho(in.server())
	}
}

// mastersAre is called with the addresses of a Cluster's masters after commands have failed. If another
// node has replaced the inbox's node, the inbox leaves its node at once: that node is dead or frozen, and
// waiting for an echo would take a second. A node that was taken out of its Cluster names no master,
// which says nothing about the others.
func (in *inbox) mastersAre(addrs []string) {
	in.mu.Lock()
	replaced := in.node != "" && len(addrs) > 0 && !slices.Contains(addrs, in.node)
	in.mu.Unlock()
	if replaced {
		in.leave()
	}
}

// leave makes run rebuild the subscription, and returns false if that was about to happen anyway.
// It closes the subscription in a goroutine, because closing waits for its dialing to end, and neither
// the watchdog nor a command's caller may wait for that.
func (in *inbox) leave() bool {
	in.mu.Lock()
	sub, cut := in.sub, in.cut
	again := in.broken || sub == nil
	in.broken = true
	in.mu.Unlock()
	if !again {
		cut()
		in.client.group.start(func() { sub.Close() }) // ends Receive
	}
	return !again
}

// requireProbe notes that a command failed, so that the subscription has to prove that it is alive
// with the next command that can ask for an echo. It does nothing if Redis itself said that it
// refuses the client.
func (in *inbox) requireProbe(fail *protocol.Failure) {
	if in == nil || fail.Lasts() {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.hearing.RequireProbe()
}

// end closes the subscription after halt, so run makes no other.
func (in *inbox) end() {
	in.mu.Lock()
	sub := in.sub
	in.broken = true
	in.mu.Unlock()
	if sub != nil {
		sub.Close() // ends Receive
	}
}
