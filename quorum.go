package leased

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/quorum"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// A client of several independent servers. The lock's state machine does not know about them: its
// server is internal/quorum, which sends each command to all of them. This file has the parts of
// the client that exist once for each server: its inboxes, and the goroutines that send commands.

// NewQuorum returns a client whose locks live on several independent Redis servers, a majority of
// which has to grant each lease. This algorithm is called Redlock. There must be 3, 5 or 7 servers,
// none of them a replica of another. Locks keep working while a majority of the servers answers.
// Like New, NewQuorum does no I/O and never closes the Redis clients. Errors match
// [ErrInvalidOption].
//
// Each of rdbs must be a client of a single server: a *redis.Client, or a type that embeds one.
// Give all processes the same servers in the same order. NewQuorum refuses two clients with one
// address, whatever their databases, but cannot tell whether two addresses lead to one server. Never
// change the set while processes run, not even one after the other: two sets can each have a majority
// that the other one does not see. See docs/redlock.md.
// If the clients' Dialers choose the server, each client still needs an Addr that no other one has.
//
// No server may be replaced by a replica of it, whoever does that: the replica may lack the last
// leases, and does not look like a server that has lost its data. NewQuorum refuses clients of
// redis.NewFailoverClient. Let a server that fails come back by itself, or empty.
//
// A server that comes back without its data may have forgotten owners, so its vote does not count
// for the time set by [WithQuarantine]. On a new set of servers, every new lock needs all of them to
// answer until that time has passed since a lock was first asked for there (with this key prefix);
// leases already held go on. So take a lock there, at least that long before you depend on a
// minority being allowed to fail. How long the servers have run does not matter.
//
// If too few servers answer a command, its error matches [ErrNoQuorum].
func NewQuorum(rdbs []redis.UniversalClient, opts ...Option) (*Client, error) {
	o, err := newClientOptions(opts)
	if err != nil {
		return nil, err
	}
	if o.quarantine == 0 {
		o.quarantine = protocol.DefaultQuarantine
	}
	switch n := len(rdbs); {
	case n != 3 && n != 5 && n != 7:
		return nil, invalid("a quorum has 3, 5 or 7 servers, not %d", n)
	case o.replicas > 0:
		return nil, invalid("WithReplicas is for a client of one deployment, not for a quorum")
	case o.lock.TTL > o.quarantine:
		return nil, invalid("TTL %v is longer than the quarantine of %v", o.lock.TTL, o.quarantine)
	}
	addrs := make([]string, len(rdbs))
	for i, rdb := range rdbs {
		d, err := deploymentOf(rdb)
		if err != nil {
			return nil, fmt.Errorf("%w (server %d of the quorum)", err, i+1)
		}
		if d.Kind != redisserver.OneNode {
			return nil, invalid("server %d of the quorum: the Redis client is not a client of a single server; use redis.NewClient", i+1)
		}
		if d.FollowsSentinel() {
			return nil, invalid("server %d of the quorum: the Redis client follows Sentinel to a replica, which may lack leases; use redis.NewClient", i+1)
		}
		addr := d.Addr()
		if twin := slices.Index(addrs[:i], addr); twin >= 0 {
			return nil, invalid("servers %d and %d of the quorum are one server: both have the address %s (if their Dialers lead elsewhere, give each its own Addr)", twin+1, i+1, addr)
		}
		addrs[i] = addr
	}
	c := newClient(o, protocol.Counted)
	c.slotMap = newSlotMap(c, redisserver.Deployment{})
	q := quorum.Options{Quarantine: o.quarantine, Client: c.id, Base: c.base, Start: c.startMember, Deliver: c.deliver, Reports: c.reports(addrs)}
	for i, rdb := range rdbs {
		srv := redisserver.NewMember(rdb, o.prefix, o.quarantine)
		in := newInbox(c, srv.Deployment)
		in.place = i
		c.inbox = append(c.inbox, in)
		q.Members, q.Inboxes = append(q.Members, srv), append(q.Inboxes, memberInbox{in})
	}
	c.quorum = quorum.New(q)
	c.server = c.quorum
	c.metrics.register()
	return c, nil
}

// WithQuarantine sets how long a server of a quorum that came back without its data may not vote. It must
// be at least the longest TTL of any lock of any process, which is 30 s by default. It is for [NewQuorum]
// only. d must be from 100 ms to 30 days. The default is 1 minute.
func WithQuarantine(d time.Duration) Option {
	return clientOption(func(o *clientOptions) error {
		if d < minTTL || d > protocol.MaxTTL {
			return invalid("quarantine %v must be between %v and %v", d, minTTL, protocol.MaxTTL)
		}
		o.quarantine = d
		return nil
	})
}

// reports returns functions that log what becomes known about the servers.
func (c *Client) reports(addrs []string) quorum.Reports {
	at := func(i int) serverName { return serverName{i + 1, addrs[i]} }
	return quorum.Reports{
		Left: func(i, answering int, why error) {
			c.log.serverLeft(at(i), answering, len(addrs), why)
		},
		Returned: func(i, answering int, after time.Duration) {
			c.log.serverReturned(at(i), answering, len(addrs), after)
		},
		Young: func(i int, left time.Duration, tooFew, again bool) {
			c.log.serverYoung(at(i), left, tooFew, again)
		},
		Refused: func(i int, why error) { c.log.serverRefuses(at(i), why) },
	}
}

// behindLocked returns how many servers of a quorum stand behind a caller's lease. It returns 0 and false if
// the caller has none, or there is only one server.
func (e *entry) behindLocked(w *call) (n int, ok bool) {
	q := e.client.quorum
	if q == nil || w.Phase != lockstate.Inside || w.Orphaned || w.Ended == lockstate.ByLoss {
		return 0, false
	}
	return q.Behind(&e.keys, e.stateLocked().Request().ID), true
}

// noteBehindLocked records how many servers of a quorum stand behind the lease of a caller that is
// unlocking. Another Unlock may have ended the lease, and still be waiting for Redis: the number is
// what stood behind the lease when that one began.
func (e *entry) noteBehindLocked(w *call) {
	if w.Phase == lockstate.Left {
		return
	}
	n, ok := e.behindLocked(w)
	w.Behind = int8(n) // set every time, because a call may enter again
	if ok {
		e.client.stats.behind[n].Add(1)
	}
}

// startMember starts a goroutine that sends to a quorum's servers. Shutdown does not wait for those
// that a server keeps waiting: they end with their timeouts.
func (c *Client) startMember(f func()) bool {
	return c.members.start(func() {
		unlabeled()
		defer c.recoverPanic("a hook of the Redis client")
		f()
	})
}

// rejoined is called when the subscription to one server was renewed. Only messages of that server
// can have been missed, so only that server is asked. Locks that wait out a pause after a failure
// ask all servers.
func (in *inbox) rejoined() {
	in.client.quorum.Rejoined(in.place)
	for _, e := range in.client.entries() {
		e.retry()
	}
}

func (in *inbox) receiveOfQuorum(m *protocol.Message) {
	if k, ok := in.client.keysOfLock(m.Key); ok {
		in.client.quorum.Receive(in.place, m, k)
	}
}

// drainQuorum cancels what the servers may still keep of ended requests, on those that answer.
func (c *Client) drainQuorum(ctx context.Context) {
	if c.quorum != nil {
		c.quorum.Drain(ctx)
	}
}

// haltQuorum halts the quorum and refuses to start more of its goroutines.
func (c *Client) haltQuorum() {
	if c.quorum != nil {
		c.members.close()
		c.quorum.Halt()
	}
}

// leaveMembers waits for the goroutines of a quorum, but not for servers that do not answer.
func (c *Client) leaveMembers() {
	if c.quorum == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), finalWait)
	defer cancel()
	c.members.wait(ctx)
}

// memberInbox is an inbox as internal/quorum sees it.
type memberInbox struct{ in *inbox }

var _ quorum.Inbox = memberInbox{}

func (m memberInbox) Channel() string { return m.in.channel }
func (m memberInbox) Confirmed() bool { return m.in.confirmed() }
func (m memberInbox) StartProbe(now time.Time, silence time.Duration) string {
	return m.in.startProbe(now, silence)
}
func (m memberInbox) Published(receivers int)               { m.in.published(receivers) }
func (m memberInbox) ProbeSent(nonce string, receivers int) { m.in.probeSent(nonce, receivers) }
func (m memberInbox) RequireProbe(fail *protocol.Failure)   { m.in.requireProbe(fail) }
