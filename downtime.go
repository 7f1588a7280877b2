package leased

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// How long Redis has not answered, for the log.

// answersLong is how long no command has failed when Redis counts as answering again. If a lock waits
// for an answer, or a lease has to be renewed, a command fails more often than that: there is one every
// 2 s, and it fails after CommandTimeout.
const answersLong = 5 * time.Second

// refusalLasts is for how long a refusal counts that no other has followed, while commands of the other
// kind are answered. Whoever waits out a refusal is refused again within less. If nobody waits, nobody may
// ask for a lock for days, and what fails then is another downtime. (So where only tries are refused, and
// more rarely than once a minute, the log of a full server has an end for each.)
const refusalLasts = time.Minute

// downtime measures for the log how long Redis has not answered. That is not the time for which the locks
// wait out an outage: it lasts for as long as any lock or renewal fails. One node of a Cluster can hang
// while the others answer, and where locks are only held, nothing but renewals fails.
type downtime struct {
	alarm
	client  *Client
	ongoing atomic.Bool // whether a command has failed, and the end of that was not logged yet; written under mu

	mu     sync.Mutex // guards what follows; only watchdog.mu, and asyncQueue.mu for a line of the log, are locked under it
	began  time.Time  // when the first command that failed was sent
	failed time.Time  // when a command last failed
	heard  time.Time  // when a command got a reply since then, zero if none did

	// refused is whether Redis refused the last command of each kind: a server whose memory is full
	// refuses those that take a lock, and renews and releases what is held.
	refused     [2]bool
	otherWorks  bool // a command of the other kind got a reply since one was refused
	notJustFull bool // since began, a command failed that a server whose memory is full carries out
}

// workKind is the kind of a command to downtime.
type workKind int

const (
	workTakes workKind = iota // takes a lock
	workKeeps                 // keeps, ends or passes on what is held: a renewal, an owner's question, a release, yield, downgrade or cancel
	workAsks                  // would have taken a lock that was not free: its answer does not say whether one can be taken
)

// kindOfCommand returns the kind of a command. a is its answer, nil if it failed. An answer shows that the
// server lets locks be taken only if it has granted or queued a request: a server whose memory is full also
// says that a lock is held, or that it is ours. (It extends the place of a request that waits, too, but
// while one waits, another command is refused within seconds.)
func kindOfCommand(cmd *protocol.Command, a *protocol.Answer) workKind {
	switch {
	case cmd.Verb != protocol.Acquire, cmd.Question:
		return workKeeps
	case a != nil && (a.Outcome == protocol.Refused || a.Kept):
		return workAsks
	}
	return workTakes
}

// commandFailed notes that a command that was sent at sentAt has failed. Its kind is never workAsks, which
// only an answer shows.
func (d *downtime) commandFailed(fail *protocol.Failure, sentAt time.Time, kind workKind) {
	if fail.Lasts() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if !d.ongoing.Swap(true) || d.otherWorks && now.Sub(d.failed) > refusalLasts {
		d.began, d.refused, d.notJustFull = sentAt, [2]bool{}, false
	}
	d.failed, d.heard, d.otherWorks = now, time.Time{}, false
	d.refused[kind] = fail.Kind == protocol.RefusedNow
	d.notJustFull = d.notJustFull || !d.refused[kind] || kind == workKeeps
}

// commandAnswered notes that a command got a reply. While Redis refuses commands of the other kind, that
// does not end the downtime, unless the refusal has passed.
func (d *downtime) commandAnswered(kind workKind) {
	if !d.ongoing.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if kind != workAsks {
		d.refused[kind] = false
	}
	now := time.Now()
	if d.refused[workTakes] || d.refused[workKeeps] {
		d.otherWorks = true
		if !d.refusalPassed(kind, now) {
			return
		}
		d.refused = [2]bool{}
	}
	if d.ongoing.Load() && d.heard.IsZero() {
		d.heard = now
		d.client.watchdog.set(d, d.heard.Add(answersLong))
	}
}

// refusalPassed reports whether, with the answer to a command of this kind, the last refusal no longer
// counts: no other has followed it for refusalLasts. If nothing has shown more than a server whose memory
// is full, only the answer to somebody who asks for a lock tells, because such a server renews and releases
// anyway.
func (d *downtime) refusalPassed(kind workKind, now time.Time) bool {
	return now.Sub(d.failed) > refusalLasts && (d.notJustFull || kind == workAsks)
}

// fire logs the end, unless a command has failed since Redis was heard.
func (d *downtime) fire(now time.Time, batch []protocol.Renewal) []protocol.Renewal {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.heard.IsZero() || now.Sub(d.heard) < answersLong {
		return batch
	}
	d.ongoing.Store(false)
	if d.heard.Sub(d.failed) < answersLong {
		d.client.log.answersAgain(inWords(d.heard.Sub(d.began)))
	} else { // nothing was sent in between
		d.client.log.answersAgain(inWords(d.failed.Sub(d.began)) + " or more")
	}
	return batch
}
