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
	first, second := redistest.Server(t), redistest.Server(t)
	ctx := context.Background()
	old, next := first.Client(), second.Client()
	defer old.Close()
	defer next.Close()
	host, port, err := net.SplitHostPort(first.Addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.ReplicaOf(ctx, host, port).Err(); err != nil {
		t.Fatal(err)
	}
	inSync := func(replica *redis.Client) func() bool {
		return func() bool {
			return strings.Contains(replica.Info(ctx, "replication").Val(), "master_link_status:up")
		}
	}
	eventually(t, "the replica is in sync", inSync(next))
	eventually(t, "and its primary knows", func() bool {
		return strings.Contains(old.Info(ctx, "replication").Val(), "state=online")
	})

	var name fixedName
	name.leadsTo.Store(&first.Addr)
	s := place{Target: redistest.Target{Addr: first.Addr, Prefix: "failover:"}, rdb: old}
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

	host, port, err = net.SplitHostPort(second.Addr)
	if err != nil {
		t.Fatal(err)
	}
	name.leadsTo.Store(&second.Addr)
	if err := old.Do(ctx, "FAILOVER", "TO", host, port).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the old primary is a replica", func() bool { return inSync(old)() })
	eventually(t, "the waiter listens to the new primary", func() bool { return len(inboxes(next)) > 0 })
	unlock(t, theirs)
	unlock(t, closesSoon(t, "it is handed over", mine))
}
