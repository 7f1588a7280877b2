package redistest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Sentinels is a primary with two replicas, and three sentinels that watch it. A primary
// that has not been heard of for a second is replaced, which takes two to three seconds in
// all. For some time the sentinels refuse a second failover, so a test can have only one.
type Sentinels struct {
	*Replication
	// Watchers lists the sentinels.
	Watchers []*Instance
}

// sentinelName is the sentinels' name for the primary.
const sentinelName = "leased"

// NewSentinels starts all of these, and returns once the sentinels know the replicas and
// each other. The arguments are appended to the command lines of the three Redis servers.
func NewSentinels(tb testing.TB, args ...string) *Sentinels {
	tb.Helper()
	s := &Sentinels{Replication: NewReplication(tb, 2, args...)}
	program := need(tb)
	host, port, _ := net.SplitHostPort(s.Nodes[0].Addr)
	for range 3 {
		dir := tb.TempDir()
		s.Watchers = append(s.Watchers, startFor(tb, plan{program: program, dir: dir, args: func(own int) ([]string, error) {
			file := filepath.Join(dir, "sentinel.conf")
			text := fmt.Sprintf(`port %d
bind 127.0.0.1
dir .
sentinel monitor %[2]s %[3]s %[4]s 2
sentinel down-after-milliseconds %[2]s 1000
sentinel failover-timeout %[2]s 5000
sentinel parallel-syncs %[2]s 2
`, own, sentinelName, host, port)
			return []string{file, "--sentinel"}, os.WriteFile(file, []byte(text), 0o600)
		}}))
	}
	for _, in := range s.Watchers {
		await(tb, "the sentinels know each other and the replicas", func() error {
			reply, err := in.ask("SENTINEL", "MASTER", sentinelName)
			if err != nil {
				return err
			}
			facts := pairs(reply)
			if facts["num-slaves"] != "2" || facts["num-other-sentinels"] != "2" || facts["flags"] != "master" {
				return fmt.Errorf("%s replicas, %s others, %s", facts["num-slaves"], facts["num-other-sentinels"], facts["flags"])
			}
			return nil
		})
	}
	return s
}

// FailoverOptions returns fresh options for redis.NewFailoverClient.
func (s *Sentinels) FailoverOptions() *redis.FailoverOptions {
	o := &redis.FailoverOptions{MasterName: sentinelName}
	for _, in := range s.Watchers {
		o.SentinelAddrs = append(o.SentinelAddrs, in.Addr)
	}
	return o
}

// PlannedFailover has a sentinel replace the primary, which goes on taking writes until the sentinels demote
// it, some ten seconds later. It does not wait for the new primary.
func (s *Sentinels) PlannedFailover() {
	s.tb.Helper()
	await(s.tb, "SENTINEL FAILOVER", func() error {
		_, err := s.Watchers[0].ask("SENTINEL", "FAILOVER", sentinelName)
		return err
	})
}

// AwaitPrimary waits until a majority of the sentinels name a primary other than old, and
// that server itself says that it is the primary.
func (s *Sentinels) AwaitPrimary(old *Instance) *Instance {
	s.tb.Helper()
	var found *Instance
	await(s.tb, "another primary than "+old.Addr, func() error {
		votes := map[string]int{}
		for _, in := range s.Watchers {
			reply, err := in.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", sentinelName)
			if at, ok := reply.([]any); ok && err == nil && len(at) == 2 {
				votes[net.JoinHostPort(fmt.Sprint(at[0]), fmt.Sprint(at[1]))]++
			}
		}
		for _, in := range s.Nodes {
			if in != old && votes[in.Addr] >= 2 && in.role() == "master" {
				found = in
				return nil
			}
		}
		return fmt.Errorf("votes: %v", votes)
	})
	return found
}

// pairs turns a reply that alternates names and values into a map.
func pairs(reply any) map[string]string {
	list, _ := reply.([]any)
	m := map[string]string{}
	for i := 0; i+1 < len(list); i += 2 {
		m[fmt.Sprint(list[i])] = fmt.Sprint(list[i+1])
	}
	return m
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return -1
	}
	return n
}
