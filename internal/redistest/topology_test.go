package redistest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestAPlannedFailoverLosesNoWriteAndCanGoBack(t *testing.T) {
	r := NewReplication(t, 1)
	first, second := r.Nodes[0], r.Nodes[1]
	if got := r.Primary(); got != first || len(r.Replicas()) != 1 {
		t.Fatalf("the primary is %s", got.Addr)
	}
	ctx := t.Context()
	for i, to := range []*Instance{second, first} {
		from := r.Primary()
		key := fmt.Sprint("k", i)
		if err := from.Client().Set(ctx, key, "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
		r.Failover(to)
		if r.Primary() != to {
			t.Fatal("another primary than asked for")
		}
		if got := to.Client().Get(ctx, key).Val(); got != "v" {
			t.Errorf("%q on the new primary", got)
		}
		if err := from.Client(once).Set(ctx, key, "w", 0).Err(); err == nil || !strings.HasPrefix(err.Error(), "READONLY") {
			t.Errorf("a write on the old primary: %v", err)
		}
	}
}

func TestAnIsolatedServerIsStaleAndReadOnlyUntilPromoted(t *testing.T) {
	r := NewReplication(t, 1)
	primary, replica := r.Nodes[0].Client(), r.Nodes[1].Client(once)
	ctx := t.Context()
	r.Nodes[1].Isolate()
	if err := primary.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := replica.Exists(ctx, "k").Result(); n != 0 || err != nil {
		t.Errorf("EXISTS on the stale server: %d, %v", n, err)
	}
	if err := replica.Set(ctx, "k", "v", 0).Err(); err == nil || !strings.HasPrefix(err.Error(), "READONLY") {
		t.Errorf("a write: %v", err)
	}
	r.Nodes[1].Promote()
	if err := r.Nodes[1].Client().Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Error(err)
	}
}

func TestAFixedNameLeadsNewConnectionsElsewhereAndKeepsWhatItIsTold(t *testing.T) {
	for _, c := range []struct {
		name           string
		keep           Keep
		commands, subs string // the server that each ends up on
	}{
		{"none", KeepNone, "new", "new"},
		{"subscriptions", KeepSubscriptions, "new", "old"},
		{"all", KeepAll, "old", "old"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, after := Server(t), Server(t)
			p := NewProxy(t, before.Addr)
			rdb := through(t, p)
			ctx := t.Context()
			before.Client().Set(ctx, "who", "old", 0)
			after.Client().Set(ctx, "who", "new", 0)
			sub := rdb.Subscribe(ctx, "news")
			defer sub.Close()
			if _, err := sub.Receive(ctx); err != nil {
				t.Fatal(err)
			}
			if got := rdb.Get(ctx, "who").Val(); got != "old" {
				t.Fatalf("before: %q", got)
			}
			heard := sub.Channel() // resubscribes when its connection is cut

			p.Lead(after.Addr, c.keep)
			if got := rdb.Get(ctx, "who").Val(); got != c.commands {
				t.Errorf("commands reach the %s server", got)
			}
			Eventually(t, "one subscription", func() bool {
				olds := before.Client().Publish(ctx, "news", "old").Val()
				news := after.Client().Publish(ctx, "news", "new").Val()
				return olds+news == 1
			})
			if got := (<-heard).Payload; got != c.subs {
				t.Errorf("the subscription is on the %s server", got)
			}
			want := map[string][2]int{"old": {1, 0}, "new": {0, 1}}[c.subs]
			if got := [2]int{before.Subscribers(), after.Subscribers()}; got != want {
				t.Errorf("subscribers: %v, want %v", got, want)
			}
		})
	}
}

func TestAProxyThatRefusesSubscriptionsPassesTheRest(t *testing.T) {
	in := Shared(t)
	p := NewProxy(t, in.Addr)
	p.RefuseSubscriptions()
	rdb := through(t, p)
	ctx := t.Context()
	sub := rdb.Subscribe(ctx, "news")
	defer sub.Close()
	if _, err := sub.ReceiveTimeout(ctx, 10*time.Second); err == nil || !strings.HasPrefix(err.Error(), "ERR unknown command") {
		t.Errorf("SUBSCRIBE: %v", err)
	}
	if err := rdb.Ping(ctx).Err(); err != nil {
		t.Error(err)
	}
	p.AllowSubscriptions()
	again := rdb.Subscribe(ctx, "news")
	defer again.Close()
	if _, err := again.ReceiveTimeout(ctx, 10*time.Second); err != nil {
		t.Error(err)
	}
}

func TestSentinelsReplaceAPrimaryThatDies(t *testing.T) {
	t.Parallel()
	s := NewSentinels(t)
	rdb := redis.NewFailoverClient(s.FailoverOptions())
	t.Cleanup(func() { _ = rdb.Close() })
	ctx := t.Context()
	if err := rdb.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	old := s.Primary()
	Eventually(t, "the replicas have it", func() bool { return rdb.Wait(ctx, 2, 0).Val() == 2 })
	old.Kill()
	next := s.AwaitPrimary(old)
	if got := next.Client().Get(ctx, "k").Val(); got != "v" {
		t.Errorf("%q on the new primary", got)
	}
	Eventually(t, "the client follows", func() bool { return rdb.Set(ctx, "k", "w", 0).Err() == nil })
}

func TestAClusterServesEveryKeyAndMovesThem(t *testing.T) {
	t.Parallel()
	c := NewCluster(t)
	rdb := c.NewClient(t)
	ctx := t.Context()
	for i := range 100 {
		if err := rdb.Set(ctx, fmt.Sprint("k", i), i, 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	key := "{tag}"
	for i := range 3 {
		rdb.Set(ctx, fmt.Sprint(key, i), i, 0)
	}
	from := c.Owner(key)
	var to *Instance
	for _, in := range c.Nodes[:masters] {
		if in != from {
			to = in
		}
	}
	m := c.BeginMove(key, to)
	if n := m.Keys(1); n != 1 {
		t.Fatalf("%d keys moved", n)
	}
	if err := rdb.MGet(ctx, key+"0", key+"1", key+"2").Err(); err == nil || !strings.HasPrefix(err.Error(), "TRYAGAIN") {
		t.Errorf("several keys during the move: %v", err)
	}
	m.End()
	if c.Owner(key) != to {
		t.Error("the slot did not move")
	}
	if got := rdb.MGet(ctx, key+"0", key+"1", key+"2").Val(); fmt.Sprint(got) != "[0 1 2]" {
		t.Errorf("after the move: %v", got)
	}
	if next := c.Failover(key); next == to || c.Owner(key) != next {
		t.Error("the master was not replaced")
	}
	Eventually(t, "a read after the failover", func() bool { return rdb.Get(ctx, key+"0").Val() == "0" })
}

func TestAClusterReplacesAMasterThatDies(t *testing.T) {
	t.Parallel()
	c := NewCluster(t)
	old := c.Owner("k")
	old.Kill()
	next := c.AwaitOwner("k", old)
	c.Settled()
	if err := next.Client().Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Error(err)
	}
}

func TestATLSServerWantsACertificateOfItsClients(t *testing.T) {
	in := TLSServer(t)
	ctx := t.Context()
	if err := in.Client().Ping(ctx).Err(); err != nil {
		t.Error(err)
	}
	bare := in.Client(once, func(o *redis.Options) { o.TLSConfig.Certificates = nil })
	if err := bare.Ping(ctx).Err(); err == nil {
		t.Error("a client without certificate was served")
	}
	clear := in.Client(once, func(o *redis.Options) { o.TLSConfig = nil })
	if err := clear.Ping(briefly(t)).Err(); err == nil {
		t.Error("a client without TLS was served")
	}
	before := in.Pid()
	in.Restart()
	if err := in.Client().Ping(ctx).Err(); err != nil || in.Pid() == before {
		t.Errorf("after Restart: %v", err)
	}
}
