//go:build unix

package faults

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// documentedRights returns the rules of docs/deployments.md, including those for a Cluster.
func documentedRights(t *testing.T) []any {
	t.Helper()
	text, err := os.ReadFile("../../docs/deployments.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := bytes.Cut(text, []byte("\n## Least rights\n"))
	var rules []any
	for _, block := range regexp.MustCompile("(?s)```\n(.*?)```").FindAllSubmatch(section, -1) {
		for _, word := range strings.Fields(string(block[1])) {
			rules = append(rules, word)
		}
	}
	if len(rules) < 30 {
		t.Fatalf("docs/deployments.md has these rules: %v", rules)
	}
	return rules
}

func TestAClustersClientNeedsTheDocumentedRights(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a Cluster; run it without -short")
	}
	t.Parallel()
	c := redistest.NewCluster(t)
	strain := redistest.NewStrain(t)
	for _, in := range c.Nodes {
		if err := in.Client().Do(t.Context(), documentedRights(t)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	user := func(o *redis.ClusterOptions) { o.Username, o.Password = "app", "secret" }
	holder, waiter := newClient(t, c.NewClient(t, user), "app:"), newClient(t, c.NewClient(t, user), "app:")
	mustUnlock(t, mustLock(t, waiter.Mutex("warm")))
	eventually(t, "it listens", func() bool {
		inboxes, err := redistest.Channels(t.Context(), c.NewClient(t), "app:leased:inbox:")
		return err == nil && len(inboxes) == 1
	})
	l := mustLock(t, holder.Mutex("x"))
	got := wait(within(t, time.Minute), waiter.Mutex("x"))
	queued(t, holder, "x", 1)
	began := time.Now()
	mustUnlock(t, l)
	o := entered(t, got)
	if took := o.at.Sub(began); took > time.Second+strain.Since(began) { // a re-check would take 2 s
		t.Errorf("the waiter entered %v after the release", took)
	}
	mustUnlock(t, o.lease)
	for _, in := range c.Nodes {
		refused, err := in.Client().ACLLog(t.Context(), 100).Result()
		if err != nil {
			t.Error(err)
		}
		for _, r := range refused {
			// go-redis works without CLIENT SETINFO, and servers before 7.2 do not know it, so no right
			// to it is needed. Servers before 7.0 do not name subcommands in this log.
			if r.Object != "client|setinfo" && r.Object != "client" {
				t.Errorf("%s refused %s: %+v", in.Addr, r.Object, r)
			}
		}
	}
}
