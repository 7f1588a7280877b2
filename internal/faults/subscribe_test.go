//go:build unix

package faults

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Some proxies do not know SUBSCRIBE. The cause is not an ACL, but the effect is the same.
func TestBehindAProxyWithoutSubscribeWaitingMeansPollingAndIsToldOnce(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	redistest.CheckLeaks(t, nil, "")
	strain := redistest.NewStrain(t)
	p := redistest.NewProxy(t, s.Addr)
	p.RefuseSubscriptions()
	var clients []*leased.Client
	var logs []*notes
	for range 2 {
		rdb := redis.NewClient(redistest.Options(p.Addr))
		t.Cleanup(func() { _ = rdb.Close() })
		log := &notes{}
		logs = append(logs, log)
		clients = append(clients, newClient(t, rdb, "", leased.WithLogger(slog.New(slog.NewTextHandler(log, nil)))))
		mustUnlock(t, mustLock(t, clients[len(clients)-1].Mutex("warm")))
	}
	for i, log := range logs {
		eventually(t, "a warning of each client", func() bool { return strings.Contains(log.String(), "level=WARN") })
		if text := log.String(); strings.Count(text, "\n") > 0 || !strings.Contains(text, "unknown command") {
			t.Errorf("client %d logged: %s", i, text)
		}
	}

	const turns = 10
	l := mustLock(t, clients[0].Mutex("x"))
	began := time.Now()
	for i := range turns {
		got := wait(within(t, patience), clients[(i+1)%2].Mutex("x"))
		queued(t, clients[0], "x", 1)
		mustUnlock(t, l)
		l = entered(t, got).lease
	}
	took := time.Since(began)
	mustUnlock(t, l)
	// The first poll comes after 50 ms, a regular re-check only after two seconds or more.
	if bound := turns*500*time.Millisecond + strain.Since(began); took > bound {
		t.Errorf("%d hand-offs took %v", turns, took)
	}
	t.Logf("%d hand-offs took %v", turns, took)
	for i, log := range logs {
		if n := strings.Count(log.String(), "unknown command"); n != 1 {
			t.Errorf("client %d logged the refusal %d times:\n%s", i, n, log)
		}
	}
}
