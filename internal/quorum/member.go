package quorum

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// member is one server of the quorum: whether it answers, and its strays, which are requests that
// it may still have although their locks no longer need them.
//
// Its goroutines are a prober while the server does not answer, which ends with an answer or with
// the client; one that checks the server once after a connection broke, or the pool had none; and
// a sweeper while strays are due. The client owns and awaits all of them, as it does the senders.
type member struct {
	srv    *redisserver.Server
	quorum *Server
	place  int // its index among the servers
	inbox  Inbox

	roundTrip protocol.RoundTrip
	refuses   atomic.Bool // whether it refused the last request that was new

	mu       sync.Mutex // guards what follows; only the mutex of the client's goroutines is locked under it
	away     bool
	left     time.Time // when it was last found to be away
	young    time.Time // end of the quarantine that was last reported
	voted    bool      // some answer did not say that it was in quarantine
	out      int       // commands under way that have no answer yet
	heard    time.Time // when the last answer came, or a command was sent while none was under way
	checking bool      // a command failed in a way that proves little, and check is running
	checked  time.Time // when check was last started
	answered time.Time // when it last answered a command
	trouble  error     // why the last command or PING had no answer
	learned  time.Time // when that became known
	emptying bool      // the server is away, and one pingThrough goes on
	strays   lockstate.CancelSchedule
	sweeping bool
	timer    *time.Timer
	stirred  chan struct{} // of capacity 1; sent to when a message comes from the server while it is away
	lanes    int           // commands of lanes that are under way
	quiet    chan struct{} // created by drain; closed when nothing is under way, or the server is away
}

const (
	firstPing   = 50 * time.Millisecond
	maxPing     = time.Second
	reportEvery = time.Minute             // while the server is away
	pingTime    = protocol.CommandTimeout // also for setting up a connection, which takes several round trips
)

// isAway reports whether the server does not answer. A server that has left commands unanswered for
// longer than patience allows is away, too, until it answers a PING.
func (m *member) isAway() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.away && m.out > 0 && time.Since(m.heard) > m.patience() {
		if m.learned.Before(m.heard) { // it is left over from an earlier failure
			m.trouble = nil
		}
		m.leaveLocked()
	}
	return m.away
}

// whyAway returns why nothing is sent to the server.
func (m *member) whyAway() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.trouble != nil {
		return m.trouble
	}
	return errAway
}

// leaveLocked notes that the server does not answer, and starts to probe it until it does.
func (m *member) leaveLocked() {
	if m.away {
		return
	}
	m.away, m.left = true, time.Now()
	m.quietLocked()
	m.quorum.start(m.probe)
}

// probe reports that the server is away, and sends it PINGs until it answers.
func (m *member) probe() {
	m.mu.Lock()
	left := m.left
	m.mu.Unlock()
	if m.quorum.base.Err() != nil {
		return
	}
	m.reportAway()
	m.pingUntilAnswered(firstPing, left)
}

func (m *member) reportAway() {
	answering, _ := m.quorum.Answering()
	m.quorum.reports.Left(m.place, answering, m.whyAway())
}

// pingUntilAnswered is the rest of probe; pause precedes the first PING. If a hook of the Redis client
// panics, which ends the goroutine, another goroutine continues.
func (m *member) pingUntilAnswered(pause time.Duration, left time.Time) {
	over := false
	defer func() {
		if !over {
			m.quorum.start(func() { m.pingUntilAnswered(min(2*pause, maxPing), left) })
		}
	}()
	stirred, reported := m.stirred, time.Now()
	for ; ; pause = min(2*pause, maxPing) {
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
			stirred = m.stirred
		case <-stirred:
			timer.Stop()
			stirred = nil // messages from a server that does not answer cause one extra PING per pause
		case <-m.quorum.base.Done():
			timer.Stop()
			over = true
			return
		}
		m.srv.DropSilent(m.quorum.base) // it may not be the server that is silent, but its connections
		err := m.ping()
		if err == nil {
			over = true
			answering, _ := m.quorum.Answering()
			m.quorum.reports.Returned(m.place, answering+1, time.Since(left)) // before it can leave again
			m.mu.Lock()
			m.away, m.heard, m.trouble = false, time.Now(), nil
			m.mu.Unlock()
			m.sweep()
			m.quorum.rejoin(m.place)
			return
		}
		m.learn(err)
		if time.Since(reported) >= reportEvery {
			m.reportAway()
			reported = time.Now()
		}
	}
}

// ping returns why the server does not answer, or nil if it does.
func (m *member) ping() error {
	ctx, cancel := context.WithTimeout(m.quorum.base, pingTime)
	defer cancel()
	err := m.srv.Ping(ctx)
	if f := redisserver.Classify(err); f == nil || f.Lasts() || redisserver.IsServerReply(err) { // or the client is closed, which commands report
		return nil
	}
	return err
}

// pingThrough sends PINGs until one meets a connection that is not broken, and returns its outcome as ping
// does. Once the server is away, only one call goes on, because a proxy without a server closes new
// connections as well; that one has more time, because the pool may have hundreds that are broken.
func (m *member) pingThrough() error {
	began, alone := time.Now(), false
	defer func() {
		if alone {
			m.mu.Lock()
			m.emptying = false
			m.mu.Unlock()
		}
	}()
	err := m.ping()
	for tries := 0; m.quorum.base.Err() == nil && (tries < maxBroken || alone && time.Since(began) < emptyingTime); tries++ {
		inUse := redisserver.ConnectionsInUse(err)
		if !inUse && !redisserver.ConnectionBroke(err) {
			break
		}
		if inUse || tries >= maxBroken {
			time.Sleep(untilOneIsFree)
		}
		m.learn(err)
		if !alone && m.isAway() {
			if alone = m.emptiesPool(); !alone {
				break
			}
		}
		err = m.ping()
	}
	if err == nil {
		m.learn(nil)
	}
	return err
}

// emptiesPool reports whether the caller is now the one that goes on to send PINGs to a server that is away.
func (m *member) emptiesPool() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	first := !m.emptying
	m.emptying = true
	return first
}

// learn notes why a PING failed, or that it did not.
func (m *member) learn(why error) {
	m.mu.Lock()
	m.learnLocked(why)
	m.mu.Unlock()
}

// learnLocked notes why a command or PING failed, or that it did not.
func (m *member) learnLocked(why error) { m.trouble, m.learned = why, time.Now() }

// check sends the server a PING at once, after a command failed in a way that provesLittle. Meanwhile
// the server is still sent commands. PINGs are repeated as long as they meet broken connections,
// because the pool may have more of these. If lost, the command was lost with its connection. It may
// have been an acquire, so if the server answers, the requests that wait ask it again. A command for
// which the pool had no connection was never sent, and an exhausted pool must not be burdened further.
func (m *member) check(lost bool) {
	defer func() { // even if a hook panics
		m.mu.Lock()
		m.checking = false
		m.mu.Unlock()
	}()
	err := m.pingThrough()
	if err == nil {
		m.stirs()
	}
	m.mu.Lock()
	switch {
	case m.away || m.quorum.base.Err() != nil:
	case err != nil:
		m.learnLocked(err)
		m.leaveLocked()
	default:
		m.heard, m.trouble = time.Now(), nil
	}
	m.mu.Unlock()
	if err == nil && lost {
		m.quorum.rejoin(m.place)
	}
}

// pingThrough puts up with so many broken connections, or for so long if it is the only one that goes on.
const (
	maxBroken    = 100
	emptyingTime = 20 * time.Second
)

// untilOneIsFree is the pause before pingThrough tries again to get a connection.
const untilOneIsFree = 20 * time.Millisecond

// provesLittle reports whether a command had no answer for a reason that says little about its server.
// The connection may have been closed long before, with all others: go-redis checks an idle connection
// before it uses it, but cannot if the connection is encrypted. Or the pool had no connection.
func provesLittle(fail *protocol.Failure) bool {
	return fail != nil && (redisserver.PoolExhausted(fail.Err) || fail.Kind == protocol.NoAnswer && redisserver.ConnectionBroke(fail.Err))
}

// stirs notes a sign of life: the server has sent a message, confirmed a subscription or answered
// check. A server that is away is sent a PING at once, because others may wait for grants that it
// still has of ours, whose cancels are due as soon as it answers.
func (m *member) stirs() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.away {
		select {
		case m.stirred <- struct{}{}:
		default:
		}
	}
}

// sending notes that a command is about to be sent. The server may be silent from then on at the
// earliest, if no other command awaits its answer.
func (m *member) sending() {
	m.mu.Lock()
	if m.out++; m.out == 1 {
		m.heard = time.Now()
	}
	m.mu.Unlock()
}

// heardOf notes the outcome of a command that was sent at that time; fail is nil if it was answered. If the
// server has answered others since, one that was not says more about its connection than about the server.
func (m *member) heardOf(fail *protocol.Failure, sent time.Time) {
	// Closing the Redis client closes connections that commands are using. That says nothing about the
	// server, nor does a panic in code that a command called. The next command will tell.
	saysNothing := fail == panicked || fail != nil && fail.Kind == protocol.NoAnswer && errors.Is(fail.Err, net.ErrClosed)
	little := provesLittle(fail) // before the mutex is locked, because it calls methods of the error
	exhausted := little && redisserver.PoolExhausted(fail.Err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.out--
	if saysNothing {
		return
	}
	if fail == nil || fail.Lasts() || fail.Kind == protocol.RefusedNow {
		m.heard, m.trouble = time.Now(), nil
		m.answered = m.heard
		return
	}
	m.learnLocked(fail.Err)
	little = little || fail.Kind == protocol.NoAnswer && sent.Before(m.answered)
	switch {
	case m.quorum.base.Err() != nil:
	case little && m.checking: // check will tell
	case little && !m.away && time.Since(m.checked) < firstPing: // the server has just answered check
	case little && !m.away:
		m.checked = time.Now()
		m.checking = m.quorum.start(func() { m.check(!exhausted) })
	default:
		m.leaveLocked()
	}
}

// do sends one command, but no renewal.
func (m *member) do(ctx context.Context, s *Send) Result {
	m.sending()
	sent := time.Now()
	res := Result{Fail: panicked}
	defer func() {
		if m.heardOf(res.Fail, sent); res.Fail == nil {
			m.roundTrip.Took(time.Since(sent))
		}
	}()
	var err error
	switch s.Kind {
	case Do:
		cmd := s.Cmd
		if s.Probes {
			cmd.Echo = m.inbox.StartProbe(cmd.At, lockstate.Silence(cmd.Place))
		}
		res.Answer, err = m.srv.Do(ctx, s.Keys, &cmd)
		if cmd.Verb == protocol.Acquire && redisserver.ConnectionBroke(err) && m.pingThrough() == nil {
			m.stirs() // it may be away, but has answered
			if ctx.Err() == nil {
				cmd.First, res.Repeated = false, true // an acquire may run twice; a release would find that it is not the owner
				res.Answer, err = m.srv.Do(ctx, s.Keys, &cmd)
			}
		}
		if cmd.Echo != "" {
			m.inbox.ProbeSent(cmd.Echo, res.Answer.Published(&cmd))
		}
		m.inbox.Published(res.Answer.Published(&cmd))
		res.Fail = redisserver.Classify(err)
		res.Young = m.quorum.young(res.Answer.Clock, res.Answer.Mark)
		if res.Answer.Mark != 0 {
			res.VoteClock = res.Answer.Mark + uint64(m.quorum.quarantine.Microseconds())
		}
		if res.Fail == nil {
			m.reportYoung(res.Young)
		}
	case Adopt:
		res.Answer, err = m.srv.Adopt(ctx, s.Keys, s.Cmd.ID, s.Token)
		res.Fail = redisserver.Classify(err)
	case Cancel:
		res.Canceled = m.srv.Cancel(ctx, []protocol.CancelRequest{s.Cancel})[0]
		res.Fail = res.Canceled.Fail
		res.Young = m.quorum.young(res.Canceled.Clock, res.Canceled.Mark)
	}
	m.failed(res.Fail)
	return res
}

// tookRequest notes whether the server took or refused a new request. Other commands do not count, nor does
// an answer that the lock is taken: a server whose memory is full gives these, and still refuses new
// requests.
func (m *member) tookRequest(c *protocol.Command, r *Result) {
	switch {
	case c.Verb != protocol.Acquire || !c.First || r.Fail == nil && r.Answer.Outcome == protocol.Refused:
	case r.Fail == nil:
		m.refuses.Store(false)
	case r.Fail.Kind == protocol.RefusedNow || r.Fail.Kind == protocol.NeedsOperator:
		m.refuses.Store(true)
	}
}

// failed notes that commands failed, if they did: the inbox has to prove itself, and a refusal is reported,
// because locks go on without the server, and it does not count as away.
func (m *member) failed(fail *protocol.Failure) {
	if fail == nil {
		return
	}
	m.inbox.RequireProbe(fail)
	if fail.Kind == protocol.RefusedNow || fail.Kind == protocol.NeedsOperator || fail.Kind == protocol.ClientClosed && m.quorum.base.Err() == nil {
		m.quorum.reports.Refused(m.place, fail.Err)
	}
}

func renewedAs(r *protocol.Renewal) Result {
	return Result{Renewed: r.Outcome, Clock: r.Clock, Fail: redisserver.Classify(r.Err)}
}

// young returns for how long the grants of a server with this clock and mark, both in µs, do not count yet.
func (s *Server) young(clock, mark uint64) time.Duration {
	if mark == 0 || clock == 0 {
		return 0
	}
	age := time.Duration(int64(clock)-int64(mark)) * time.Microsecond
	return max(0, min(s.quarantine, s.quarantine-age))
}

func (m *member) isYoung(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return now.Before(m.young)
}

// isOld reports whether the server has answered, and not from a quarantine.
func (m *member) isOld() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.voted && !time.Now().Before(m.young)
}

// soonAgain is how soon after a loss of its data a server that loses it once more is reported as one that does
// so again: one that was restarted on purpose runs for longer.
const soonAgain = 10 * time.Minute

// reportYoung reports each quarantine once.
func (m *member) reportYoung(left time.Duration) {
	m.mu.Lock()
	if left == 0 { // or the answer does not tell, as that to a release
		m.voted = true
		m.mu.Unlock()
		return
	}
	now := time.Now()
	end := now.Add(left)
	// An answer that was late on its way looks like a later end. So a second restart within that time has no report.
	late := min(protocol.CommandTimeout+time.Second, max(time.Second, m.quorum.quarantine/2))
	known := !end.After(m.young.Add(late)) // else the server has restarted again
	again := !m.young.IsZero() && end.Sub(m.young) < max(m.quorum.quarantine, soonAgain)
	if !known {
		m.young = end
	}
	m.mu.Unlock()
	if !known {
		m.quorum.reports.Young(m.place, left, m.quorum.tooFewVote(), again)
	}
}

// renew sends renewals in one round trip.
func (m *member) renew(sends []*Send) []Result {
	ctx := m.quorum.contextOf(sends[0].op)
	batch := make([]protocol.Renewal, len(sends))
	for i, s := range sends {
		batch[i] = s.Renew
	}
	m.sending()
	sent, fail := time.Now(), panicked
	defer func() { m.heardOf(fail, sent) }()
	m.srv.Renew(ctx, batch)
	results := make([]Result, len(batch))
	answered := false
	for i := range batch {
		results[i] = renewedAs(&batch[i])
		if fail = results[i].Fail; fail == nil {
			answered = true
		}
	}
	if answered {
		fail = nil
	}
	m.failed(fail)
	return results
}

// keepTokens extends the lifetime of the last tokens where that is due, and probes the inbox.
func (m *member) keepTokens(sends []*Send, results []Result) {
	ctx, cancel := context.WithTimeout(m.quorum.base, protocol.CommandTimeout)
	defer cancel()
	var due []protocol.Renewal
	for i, s := range sends {
		if r := s.Renew; r.Touch.Life > 0 && results[i].Renewed == protocol.Granted {
			r.Outcome, r.Clock = protocol.Granted, results[i].Clock
			due = append(due, r)
		}
	}
	if len(due) > 0 {
		_ = m.srv.Touch(ctx, due) // if it fails, at least two more tries follow before the token expires
	}
	if nonce := m.inbox.StartProbe(time.Now(), lockstate.OwnerSilence); nonce != "" {
		n, err := m.srv.Echo(ctx, sends[0].Keys, m.inbox.Channel(), nonce)
		if err != nil {
			n = protocol.NoEcho
		}
		m.inbox.Published(n)
		m.inbox.ProbeSent(nonce, n)
	}
}

// stray schedules the cancel of a request that the server may still have.
func (m *member) stray(s Stray) {
	m.mu.Lock()
	s.ScheduleIn(&m.strays, s.Keys, time.Now())
	m.mu.Unlock()
	m.sweep()
}

// sweep starts to cancel the strays that are due, unless a sweep is running or the server is away.
func (m *member) sweep() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sweeping || m.away || m.quorum.base.Err() != nil {
		return
	}
	m.sweeping = true
	if !m.quorum.start(m.sweepDue) {
		m.sweeping = false
	}
}

func (m *member) sweepDue() {
	for {
		m.mu.Lock()
		batch := m.strays.Take(time.Now())
		if len(batch) == 0 || m.away {
			for _, g := range batch {
				m.strays.Answered(g, protocol.Canceled{Fail: &protocol.Failure{Err: errAway, Kind: protocol.NeverSent}}, time.Now())
			}
			m.restLocked()
			m.mu.Unlock()
			return
		}
		m.mu.Unlock()
		m.cancel(batch)
	}
}

// cancel cancels strays. If a hook of the Redis client panics, which ends the goroutine, another
// sweep tries them again, like those that had no answer.
func (m *member) cancel(batch []*lockstate.Cancellation) {
	requests := make([]protocol.CancelRequest, len(batch))
	results := make([]protocol.Canceled, len(batch))
	for i, g := range batch {
		requests[i] = protocol.CancelRequest{Keys: g.Owner.(*protocol.Keys), ID: g.ID, Last: g.Last}
		results[i] = protocol.Canceled{Fail: panicked}
	}
	ctx, stop := context.WithTimeout(m.quorum.base, protocol.CommandTimeout)
	defer stop()
	m.sending()
	sent := time.Now()
	defer func() {
		m.heardOf(results[0].Fail, sent)
		m.mu.Lock()
		defer m.mu.Unlock()
		for i, g := range batch {
			m.strays.Answered(g, results[i], time.Now())
		}
		if results[0].Fail == panicked {
			m.restLocked()
		}
	}()
	results = m.srv.Cancel(ctx, requests)
	m.failed(results[0].Fail)
}

// restLocked ends a sweep, and sets the timer for the next one.
func (m *member) restLocked() {
	m.sweeping = false
	m.quietLocked()
	if next := m.strays.Next(); !next.IsZero() && !m.away {
		if m.timer != nil {
			m.timer.Stop()
		}
		m.timer = time.AfterFunc(time.Until(next), m.sweep)
	}
}

// begun notes that a command of a lane is under way. done notes that it has been answered, and that
// the next command of the lane has begun.
func (m *member) begun() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lanes++
}

func (m *member) done() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lanes--
	m.quietLocked()
}

// quietLocked wakes drain if nothing is under way, or the server is away.
func (m *member) quietLocked() {
	if m.quiet != nil && (m.away || m.lanes == 0 && !m.sweeping) {
		close(m.quiet)
		m.quiet = nil
	}
}

// drain waits until the commands under way were answered, such as a release that was decided without
// this server, and the strays that are due were tried. It does not wait for a server that does not
// answer, and returns when ctx ends.
func (m *member) drain(ctx context.Context) {
	for !m.isAway() {
		m.mu.Lock()
		if m.lanes == 0 && !m.sweeping {
			m.mu.Unlock()
			return
		}
		if m.quiet == nil {
			m.quiet = make(chan struct{})
		}
		quiet := m.quiet
		m.mu.Unlock()
		known := m.roundTrip.Estimate() > 0
		silent := time.NewTimer(minPatience)
		select {
		case <-quiet:
		case <-silent.C: // isAway checks whether the server still answers
			if !known { // it never has
				silent.Stop()
				return
			}
		case <-ctx.Done():
		}
		silent.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// halt stops the timer, which no goroutine waits for.
func (m *member) halt() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.timer != nil {
		m.timer.Stop()
	}
}
