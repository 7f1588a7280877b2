//go:build unix

package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

func TestANodeOfAClusterThatHangsHoldsUpOnlyItsOwnLocks(t *testing.T) {
	if testing.Short() {
		t.Skip("a Cluster takes seconds to start; run it without -short")
	}
	c := redistest.NewCluster(t, "--cluster-require-full-coverage", "no", "--cluster-replica-no-failover", "yes")
	silent := c.Nodes[0]
	var away string
	var there []string
	for i := 0; away == "" || len(there) < 4; i++ {
		name := fmt.Sprint("lock", i)
		if c.Owner(name) == silent {
			away = name
		} else {
			there = append(there, name)
		}
	}
	silent.Stop()
	t.Cleanup(silent.Cont)
	at := []string{"--cluster", "--redis", strings.Join(c.ClusterOptions().Addrs, ",")}

	// Which nodes are asked is a matter of chance.
	for _, name := range there {
		began := time.Now()
		if got := invoke(t, append([]string{"inspect", name}, at...)...); got.status != 0 {
			t.Errorf("inspect: %+v", got)
		}
		if status, out, errs := runResult(t, "", append(at, name, "--", "echo", "done")...); status != 0 || out != "done\n" || errs != "" {
			t.Errorf("run: status %d, stdout %q, stderr %q", status, out, errs)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("both took %v", took)
		}
	}

	began := time.Now()
	named := "no Redis at " + silent.Addr + ", which "
	status, _, errs := runResult(t, "", append(at, "-w", "0.1", away, "--", "true")...)
	if took := time.Since(began); status != statusRunUnavailable || !strings.Contains(errs, named) || took > 5*time.Second {
		t.Errorf("run: status %d, stderr %q after %v", status, errs, took)
	}

	// Each of these waits for five seconds.
	fails := func(want, line string, at ...string) {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			got := invoke(t, append(strings.Fields(line), at...)...)
			if got.status != 1 || !strings.Contains(got.err, want) || !strings.Contains(got.err, "did not answer in time") {
				t.Errorf("%+v", got)
			}
		})
	}
	for _, line := range []string{"inspect " + away, "unlock --force --yes " + away, "ls", "top --count 1", "doctor"} {
		fails(named, line, at...)
	}
	fails("no Redis at "+silent.Addr+": ", "inspect "+there[0], "--cluster", "--redis", silent.Addr)
}
