package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Replication is a primary with replicas, each on a real server of its own. The primary
// can change; Primary says which one it is.
type Replication struct {
	// Nodes lists the original primary first.
	Nodes []*Instance

	tb testing.TB
}

// NewReplication starts a primary and the given number of replicas, and returns once the
// replicas are in sync. The arguments are appended to the command line of each.
func NewReplication(tb testing.TB, replicas int, args ...string) *Replication {
	tb.Helper()
	// A replica is served at once instead of waiting for others that might come.
	args = append([]string{"--repl-diskless-sync-delay", "0"}, args...)
	r := &Replication{Nodes: []*Instance{Server(tb, args...)}, tb: tb}
	for range replicas {
		in := Server(tb, args...)
		in.Follow(r.Nodes[0])
		r.Nodes = append(r.Nodes, in)
	}
	for _, in := range r.Nodes[1:] {
		in.awaitSync()
	}
	return r
}

// Primary returns the only node that says it is the primary, waiting while no node or
// several say so. It does not wait for dead or frozen nodes.
func (r *Replication) Primary() *Instance {
	r.tb.Helper()
	var found *Instance
	await(r.tb, "one primary", func() error {
		found = nil
		for _, in := range r.Nodes {
			if in.role() != "master" {
				continue
			}
			if found != nil {
				return fmt.Errorf("both %s and %s are primaries", found.Addr, in.Addr)
			}
			found = in
		}
		if found == nil {
			return errors.New("no node is")
		}
		return nil
	})
	return found
}

// Replicas returns the nodes that say they are replicas, in the order of Nodes.
func (r *Replication) Replicas() []*Instance {
	var found []*Instance
	for _, in := range r.Nodes {
		if in.role() == "slave" {
			found = append(found, in)
		}
	}
	return found
}

// Failover performs a planned failover, which loses no write. It returns once the former
// primary is a replica of the new one and in sync with it. If there is more than one
// replica, the others keep following the former primary.
func (r *Replication) Failover(to *Instance) {
	r.tb.Helper()
	old := r.Primary()
	host, port, _ := net.SplitHostPort(to.Addr)
	// The replica's acknowledgment of the required offset comes with its next heartbeat, which
	// it sends once a second.
	await(r.tb, "FAILOVER", func() error {
		_, err := old.ask("FAILOVER", "TO", host, port, "TIMEOUT", "10000")
		return err
	})
	await(r.tb, "the end of the failover", func() error {
		if role := to.role(); role != "master" {
			return fmt.Errorf("%s is still a %s", to.Addr, role)
		}
		return nil
	})
	old.awaitSync()
}

// Follow makes the server a replica of primary. It does not wait.
func (in *Instance) Follow(primary *Instance) {
	in.helper()
	host, port, _ := net.SplitHostPort(primary.Addr)
	in.mustAsk("REPLICAOF", host, port)
}

// Isolate makes the server a replica of an unreachable primary: it is read-only, keeps its
// data and goes on answering, like a demoted primary or a replica whose link is cut.
func (in *Instance) Isolate() {
	in.helper()
	in.mustAsk("REPLICAOF", "127.0.0.1", "1") // nobody listens on port 1
}

// Promote undoes Follow and Isolate: the server is a primary again.
func (in *Instance) Promote() {
	in.helper()
	in.mustAsk("REPLICAOF", "NO", "ONE")
}

// awaitSync waits until a replica has caught up with its primary and is connected to it.
func (in *Instance) awaitSync() {
	in.helper()
	await(in.tb, in.Addr+" in step with its primary", func() error {
		if in.role() != "slave" {
			return errors.New("it is not a replica")
		}
		info, err := in.ask("INFO", "replication")
		if err != nil {
			return err
		}
		if text := fmt.Sprint(info); !strings.Contains(text, "master_link_status:up") || strings.Contains(text, "master_sync_in_progress:1") {
			return errors.New("link down, or copying")
		}
		return nil
	})
}

// Subscribers returns the number of connections that have subscribed to something, not
// counting those of replicas and sentinels.
func (in *Instance) Subscribers() int {
	in.helper()
	list := fmt.Sprint(in.mustAsk("CLIENT", "LIST", "TYPE", "pubsub"))
	return strings.Count(list, "\n") - strings.Count(list, " name=sentinel-")
}

// role returns "master", "slave", "sentinel", or "" if the server does not answer.
func (in *Instance) role() string {
	reply, err := in.ask("ROLE")
	if parts, ok := reply.([]any); ok && err == nil && len(parts) > 0 {
		return fmt.Sprint(parts[0])
	}
	return ""
}

// soon bounds the wait for a server that may be frozen.
const soon = 2 * time.Second

// ask sends one command once, on a connection of its own.
func (in *Instance) ask(args ...any) (any, error) {
	o := in.Options()
	o.MaxRetries, o.DialerRetries = -1, 1
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = soon, soon, soon
	o.Protocol = 2 // replies are plain lists, whatever the server's version
	o.DisableIdentity = true
	rdb := redis.NewClient(o)
	defer rdb.Close()
	return rdb.Do(context.Background(), args...).Result()
}

func (in *Instance) mustAsk(args ...any) any {
	in.helper()
	reply, err := in.ask(args...)
	if err != nil {
		in.fail(fmt.Errorf("redistest: %v at %s: %w", args, in.Addr, err))
	}
	return reply
}

// await calls is until it returns nil. No event announces what servers do.
func await(tb testing.TB, what string, is func() error) {
	tb.Helper()
	const patience, pace = 30 * time.Second, 5 * time.Millisecond
	for until := time.Now().Add(patience); ; time.Sleep(pace) {
		err := is()
		if err == nil {
			return
		}
		if time.Now().After(until) {
			tb.Fatalf("redistest: not within %v: %s: %v", patience, what, err)
		}
	}
}
