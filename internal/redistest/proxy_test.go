package redistest

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// once makes a client that does not retry, and that gives up when its context ends.
func once(o *redis.Options) {
	o.MaxRetries = -1
	o.ContextTimeoutEnabled = true
	o.DialerRetries = 1
}

// briefly is for calls that must not get an answer. Calls that must get one have seconds.
func briefly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func through(t *testing.T, p *Proxy, change ...func(*redis.Options)) *redis.Client {
	return newClient(t, Options(p.Addr), change)
}

func TestProxyPassesAndCounts(t *testing.T) {
	in := Shared(t)
	p := NewProxy(t, in.Addr)
	rdb := through(t, p)
	big := string(make([]byte, 200<<10))
	key := Prefix(t) + "k"
	if err := rdb.Set(t.Context(), key, big, time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	if got := rdb.Get(t.Context(), key).Val(); got != big {
		t.Errorf("%d bytes came back", len(got))
	}
	// As many as the client has; the client may dial once more than it needs.
	Eventually(t, "all connections are counted", func() bool {
		n := p.Conns()
		return n >= 1 && n == int(rdb.PoolStats().TotalConns)
	})
	_ = rdb.Close()
	Eventually(t, "the closed connection is forgotten", func() bool { return p.Conns() == 0 })
}

func TestDroppedRepliesLeaveCommandsCarriedOut(t *testing.T) {
	in := Shared(t)
	direct, key := in.Client(), Prefix(t)+"n"
	p := NewProxy(t, in.Addr)
	rdb := through(t, p, once)
	ctx := t.Context()
	if err := rdb.Ping(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	p.DropReplies()
	// The command must have been sent before the timeout, hence a longer one.
	long, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := rdb.Incr(long, key).Err(); err == nil {
		t.Error("a reply came through")
	}
	Eventually(t, "the command runs", func() bool { return direct.Get(ctx, key).Val() == "1" })
	p.Heal()
	if n, err := rdb.Incr(ctx, key).Result(); err != nil || n != 2 {
		t.Errorf("after Heal: %d, %v", n, err)
	}
	direct.Expire(ctx, key, time.Minute)
}

func TestBlackHoleTellsNobodyThatPeersAreGone(t *testing.T) {
	in := Server(t)
	direct, ctx := in.Client(), t.Context()
	p := NewProxy(t, in.Addr)
	rdb, reader := through(t, p, once), through(t, p, once)
	sub := reader.Subscribe(ctx, "news")
	if _, err := sub.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	p.BlackHole()
	if err := rdb.Incr(briefly(t), "n").Err(); err == nil {
		t.Error("a new connection came through")
	}
	if n := direct.Exists(ctx, "n").Val(); n != 0 {
		t.Error("a request came through")
	}
	open := p.Conns()
	_ = sub.Close()
	Eventually(t, "the client has left", func() bool { return p.Conns() < open })
	if n := direct.Publish(ctx, "news", "x").Val(); n != 1 {
		t.Errorf("the server counts %d subscribers, want the one that is gone", n)
	}
	p.Heal()
	Eventually(t, "the server notices", func() bool { return direct.Publish(ctx, "news", "x").Val() == 0 })
	if err := rdb.Ping(ctx).Err(); err != nil {
		t.Errorf("a new connection after Heal: %v", err)
	}
}

func TestBlackHoledConnectionStaysDeadUntilCut(t *testing.T) {
	in := Server(t)
	direct, ctx := in.Client(), t.Context()
	p := NewProxy(t, in.Addr)
	rdb := through(t, p)
	sub := rdb.Subscribe(ctx, "news")
	defer sub.Close()
	if _, err := sub.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	p.BlackHole()
	p.Heal()
	direct.Publish(ctx, "news", "lost")
	if m, err := sub.ReceiveTimeout(ctx, 30*time.Millisecond); err == nil {
		t.Errorf("a dead connection said %v", m)
	}
	p.Cut()
	wait, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for range 100 { // the client first receives the error of the cut, then subscribes again
		if _, err := sub.Receive(wait); err == nil {
			break
		}
	}
	if n := direct.Publish(ctx, "news", "x").Val(); n != 1 {
		t.Errorf("%d subscribers after reconnection", n)
	}
}

func TestRefusedDialsAndAcceptOnTheSamePort(t *testing.T) {
	in := Shared(t)
	p := NewProxy(t, in.Addr)
	present, late := through(t, p, once), through(t, p, once)
	ctx := t.Context()
	if err := present.Ping(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	p.Refuse()
	p.Refuse()
	if err := late.Ping(ctx).Err(); err == nil {
		t.Error("a new connection was accepted after Refuse")
	}
	if err := present.Ping(ctx).Err(); err != nil {
		t.Errorf("the present connection: %v", err)
	}
	p.Accept()
	p.Accept()
	if err := late.Ping(ctx).Err(); err != nil {
		t.Error(err)
	}
}

func TestProxyLeavesNoGoroutines(t *testing.T) {
	for name, fault := range map[string]func(*Proxy){
		"healthy":     func(*Proxy) {},
		"blackHole":   (*Proxy).BlackHole,
		"dropReplies": (*Proxy).DropReplies,
		"refuse":      (*Proxy).Refuse,
	} {
		t.Run(name, func(t *testing.T) {
			in := Shared(t)
			CheckLeaks(t, nil, "")
			p := NewProxy(t, in.Addr)
			rdb := through(t, p, once)
			_ = rdb.Ping(t.Context()).Err()
			fault(p)
			_ = rdb.Ping(briefly(t)).Err()
			_ = through(t, p, once).Ping(briefly(t)).Err()
		})
	}
}

func TestProxyToNowhereClosesConnections(t *testing.T) {
	p := NewProxy(t, "127.0.0.1:1") // nobody listens on port 1
	if err := through(t, p, once).Ping(t.Context()).Err(); err == nil {
		t.Error("somebody answered")
	}
	Eventually(t, "no connection is left", func() bool { return p.Conns() == 0 })
}
