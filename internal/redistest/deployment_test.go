package redistest

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestNoChangeOfAnOptionIsDroppedWithSeveralServers(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*redis.Options)
		said   string
	}{
		{"none", func(*redis.Options) {}, ""},
		{"a timeout", func(o *redis.Options) { o.ReadTimeout = time.Minute }, ""},
		{"the address", func(o *redis.Options) { o.Addr = "127.0.0.1:1" }, "skipped: redistest: about one server's connection"},
		{"the dialer", func(o *redis.Options) {
			o.Dialer = func(context.Context, string, string) (net.Conn, error) { return nil, net.ErrClosed }
		}, "skipped: redistest: about one server's connection"},
		{"the address and another timeout", func(o *redis.Options) { o.Addr, o.WriteTimeout = "127.0.0.1:1", time.Minute },
			"skipped: redistest: about one server's connection"},
		{"another timeout", func(o *redis.Options) { o.WriteTimeout = time.Minute }, "redistest: the option WriteTimeout is not carried over to several servers"},
		{"a callback", func(o *redis.Options) { o.OnConnect = func(context.Context, *redis.Conn) error { return nil } },
			"redistest: the option OnConnect is not carried over to several servers"},
	} {
		cluster, failover := &redis.ClusterOptions{}, &redis.FailoverOptions{}
		for _, all := range []any{cluster, failover} {
			s := &spy{TB: t, name: c.name}
			carry(s, Options("127.0.0.1:2"), []func(*redis.Options){c.change}, all)
			if said := strings.Join(s.said, "\n"); said != c.said {
				t.Errorf("%s: %q, want %q", c.name, said, c.said)
			}
		}
		if c.name == "a timeout" && (cluster.ReadTimeout != time.Minute || failover.ReadTimeout != time.Minute) {
			t.Errorf("a read timeout of %v and %v", cluster.ReadTimeout, failover.ReadTimeout)
		}
	}
}
