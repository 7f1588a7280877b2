package leased_test

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// fixedName is a name that leads to one server, and then to another: connections
// that are there stay where they are.
type fixedName struct{ leadsTo atomic.Pointer[string] }

func (n *fixedName) change(o *redis.Options) {
	direct := redis.NewDialer(o)
	o.Dialer = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return direct(ctx, network, *n.leadsTo.Load())
	}
}

// plannedFailover is a primary and its replica, with a name that leads to the primary.
type plannedFailover struct {
	fixedName
	place
	first, second *redistest.Instance
	old, next     *redis.Client
}

func newPlannedFailover(t *testing.T) *plannedFailover {
	t.Helper()
	p := &plannedFailover{first: redistest.Server(t), second: redistest.Server(t)}
	p.old, p.next = p.first.Client(), p.second.Client()
	t.Cleanup(func() {
		_ = p.old.Close()
		_ = p.next.Close()
	})
	ctx := context.Background()
	host, port, err := net.SplitHostPort(p.first.Addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.next.ReplicaOf(ctx, host, port).Err(); err != nil {
		t.Fatal(err)
	}
	p.inSync(t, p.next)
	eventually(t, "its primary knows", func() bool {
		return strings.Contains(p.old.Info(ctx, "replication").Val(), "state=online")
	})
	p.leadsTo.Store(&p.first.Addr)
	p.place = place{Target: redistest.Target{Addr: p.first.Addr, Prefix: "failover:"}, rdb: p.old}
	return p
}

func (p *plannedFailover) inSync(t *testing.T, replica *redis.Client) {
	t.Helper()
	eventually(t, "the replica is in sync", func() bool {
		return strings.Contains(replica.Info(context.Background(), "replication").Val(), "master_link_status:up")
	})
}

// failOver has the two servers exchange their roles, and the name lead to the new primary.
func (p *plannedFailover) failOver(t *testing.T) {
	t.Helper()
	host, port, err := net.SplitHostPort(p.second.Addr)
	if err != nil {
		t.Fatal(err)
	}
	p.leadsTo.Store(&p.second.Addr)
	if err := p.old.Do(context.Background(), "FAILOVER", "TO", host, port).Err(); err != nil {
		t.Fatal(err)
	}
	p.inSync(t, p.old)
}

// lateAnswers is a hook.
type lateAnswers struct{}

func (lateAnswers) DialHook(next redis.DialHook) redis.DialHook { return next }

func (lateAnswers) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return n
}

func (lateAnswers) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		defer time.Sleep(50 * time.Millisecond) // what makes them late
		return next(ctx, cmd)
	}
}

// The old primary is a replica then, and passes on to its subscribers what the new one
// publishes, echoes included.
func TestAfterAPlannedFailoverBehindAFixedNameTheInboxMovesToTheNewPrimary(t *testing.T) {
	t.Parallel()
	p := newPlannedFailover(t)
	name, s, first, old, next := &p.fixedName, p.place, p.first, p.old, p.next
	ctx := context.Background()
	owner := clientOn(t, s, first.Client(name.change))
	// The echo arrives over another connection, before the count of its receivers.
	slow := first.Client(name.change, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	slow.AddHook(lateAnswers{})
	waiter := clientOn(t, s, slow)
	theirs := lock(t, owner.Mutex("x"))
	mine := locking(t, waiter.Mutex("x"))
	s.queued(t, "x", 1)
	inboxes := func(rdb *redis.Client) []string {
		all := rdb.PubSubChannels(ctx, s.Prefix+"leased:inbox:*").Val()
		slices.Sort(all)
		return all
	}
	eventually(t, "both listen", func() bool { return len(inboxes(old)) == 2 })

	p.failOver(t)
	eventually(t, "the waiter listens to the new primary", func() bool { return len(inboxes(next)) > 0 })
	unlock(t, theirs)
	unlock(t, closesSoon(t, "it is handed over", mine))
}

// Behind a name that leaves connections alone, all that were in the pool lead to the old primary, which
// answers, as a replica.
func TestAfterAPlannedFailoverBehindAFixedNameTheConnectionsInThePoolCostNothing(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]func(c *leased.Client) error{
		"a try": func(c *leased.Client) error {
			l, err := c.Mutex("x").TryLockContext(context.Background())
			if err == nil {
				err = l.Unlock()
			}
			return err
		},
		"an eviction":  func(c *leased.Client) error { return c.ForceUnlock(context.Background(), "nobody's") },
		"a renewal":    nil,
		"an unlocking": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlannedFailover(t)
			const idle = 30
			rdb := p.first.Client(p.change, func(o *redis.Options) { o.PoolSize = idle + 10 })
			c := clientOn(t, p.place, rdb)
			held := lock(t, c.Mutex("held"))
			fillPool(t, rdb, idle)
			p.failOver(t)
			switch {
			case try != nil:
				if err := try(c); err != nil {
					t.Error(err)
				}
			case name == "a renewal":
				if err := held.Check(context.Background()); err != nil {
					t.Error(err)
				}
			}
			unlock(t, held)
		})
	}
}
