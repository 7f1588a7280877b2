package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// remember has Redis know the last tokens of n locks that are free.
func remember(t *testing.T, rdb redis.UniversalClient, format string, n int) {
	t.Helper()
	set(t, rdb, format, n, func(k *protocol.Keys) string { return k.Meta() })
}

// hold has somebody hold n locks.
func hold(t *testing.T, rdb redis.UniversalClient, format string, n int) {
	t.Helper()
	set(t, rdb, format, n, func(k *protocol.Keys) string { return k.Lock })
}

func set(t *testing.T, rdb redis.UniversalClient, format string, n int, key func(*protocol.Keys) string) {
	t.Helper()
	_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for i := range n {
			keys, err := protocol.NewKeys("", fmt.Sprintf(format, i))
			if err != nil {
				return err
			}
			p.Set(t.Context(), key(&keys), "1", time.Hour)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// picture refreshes top and returns what it shows: the summary, and the rows by their first column.
func picture(t *testing.T, top *top) (summary string, rows map[string][]string, order []string) {
	t.Helper()
	if err := top.refresh(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	top.show(&out, time.Now(), 0)
	summary, table, _ := strings.Cut(out.String(), "\n")
	rows = map[string][]string{}
	for i, line := range strings.Split(strings.TrimSpace(table), "\n") {
		if fields := strings.Fields(line); i > 0 {
			rows[fields[0]], order = fields, append(order, fields[0])
		}
	}
	return summary, rows, order
}

// A service that locks each of its requests by a name of its own adds thousands of names for each refresh.
func TestTopShowsALockAsItIsNowBesideManyNewNames(t *testing.T) {
	rdb := redistest.Server(t).Client()
	client, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	other, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	top, names := newTop(rdb, "", "*"), 0
	requests := func() {
		names++
		remember(t, rdb, fmt.Sprint("request:", names, ":%d"), 3*topLooks)
	}
	remember(t, rdb, "job%.0d", 1) // without its number
	requests()
	if summary, rows, _ := picture(t, top); len(rows) > 0 {
		t.Fatalf("of free locks it shows %d: %s", len(rows), summary)
	}

	lease, err := client.Mutex("job").LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { // ended by cancel; waited for below
		_, err := other.Mutex("job").LockContext(ctx)
		ended <- err
	}()
	queue := func(n int64) {
		eventually(t, fmt.Sprint("the queue has ", n), func() bool { return rdb.ZCard(t.Context(), "job:{job}:queue").Val() == n })
	}
	queue(1)
	for range 3 {
		requests()
		if summary, rows, _ := picture(t, top); len(rows) != 1 || len(rows["job"]) < 4 || rows["job"][1] != "held" || rows["job"][3] != "1" {
			t.Fatalf("of a held lock that one process waits for it shows %q: %s", rows["job"], summary)
		}
	}
	cancel()
	<-ended
	other.Close()
	queue(0)
	requests()
	if _, rows, _ := picture(t, top); len(rows["job"]) < 4 || rows["job"][3] != "0" {
		t.Errorf("when nobody waits anymore it shows %q", rows["job"])
	}
	if err := lease.Unlock(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lock is free", func() bool { return rdb.Exists(t.Context(), "job").Val() == 0 })
	requests()
	if summary, rows, _ := picture(t, top); len(rows) > 0 {
		t.Errorf("of a lock that was unlocked it shows %q: %s", rows["job"], summary)
	}
}

func TestTopKeepsNoFreeLocksAndForgetsWhatRedisForgets(t *testing.T) {
	rdb := redistest.Server(t).Client()
	top := newTop(rdb, "", "*")
	remember(t, rdb, "free:%d", 5*topLooks)
	picture(t, top)
	if len(top.locks) > 0 {
		t.Errorf("of free locks it keeps %d", len(top.locks))
	}
	remember(t, rdb, "held:%d", 5*topLooks)
	hold(t, rdb, "held:%d", 5*topLooks)
	picture(t, top)
	if len(top.locks) != 5*topLooks {
		t.Fatalf("of %d held locks it knows %d", 5*topLooks, len(top.locks))
	}
	// They become free, and Redis still knows their last tokens.
	for i := range 4 * topLooks {
		rdb.Del(t.Context(), fmt.Sprint("held:", i))
	}
	picture(t, top)
	if n := len(top.locks); n != topLooks {
		t.Errorf("of %d held locks and %d that are free now it knows %d", topLooks, 4*topLooks, n)
	}
	rdb.FlushAll(t.Context())
	picture(t, top)
	if summary, _, _ := picture(t, top); len(top.locks) > 0 {
		t.Errorf("of locks that Redis has forgotten it knows %d: %s", len(top.locks), summary)
	}
}

func TestOfTooManyLocksTopShowsThoseThatItLookedAt(t *testing.T) {
	rdb := redistest.Server(t).Client()
	top := newTop(rdb, "", "*")
	remember(t, rdb, "held:%03d", 5*topLooks)
	hold(t, rdb, "held:%03d", 5*topLooks)
	looks := map[string]int{}
	news := 0
	for refreshes := 1; looks["held:500"] < 2 || looks["new:1:0"] == 0; refreshes++ {
		summary, rows, order := picture(t, top)
		if want := fmt.Sprintf("200 locks held or waited for, 0 processes waiting; %d more were not looked at for this refresh", 800+news*topLooks); summary != want || len(rows) != topLooks {
			t.Errorf("it shows %d rows: %s", len(rows), summary)
		}
		if refreshes > 1 && (order[0] != "held:000" || order[topAgain-1] != fmt.Sprintf("held:%03d", topAgain-1)) {
			t.Errorf("of locks without queues, those that were shown first have given way to %s and %s", order[0], order[topAgain-1])
		}
		for name, row := range rows {
			if looks[name]++; top.locks[name].looked != top.turn {
				t.Errorf("it shows %q as of an earlier refresh", row)
			}
		}
		if refreshes == 40 {
			t.Fatalf("it looked at an old lock %d times, and at a new one %d times", looks["held:500"], looks["new:1:0"])
		}
		news++
		remember(t, rdb, fmt.Sprint("new:", news, ":%d"), topLooks)
		hold(t, rdb, fmt.Sprint("new:", news, ":%d"), topLooks)
	}
}

func TestOfTooManyLocksTopShowsThoseWithQueuesAtOnce(t *testing.T) {
	rdb := redistest.Server(t).Client()
	top := newTop(rdb, "", "*")
	remember(t, rdb, "held:%03d", 5*topLooks)
	hold(t, rdb, "held:%03d", 5*topLooks)
	for range 20 { // until it has looked at each
		picture(t, top)
	}
	for name, w := range top.locks {
		if w.looked == 0 {
			t.Fatalf("it has not looked at %s", name)
		}
	}
	take(t, rdb, "", "new")
	for i, name := range []string{"held:998", "new"} {
		client, err := leased.New(rdb)
		if err != nil {
			t.Fatal(err)
		}
		waits(t, client, name)
		eventually(t, "the waiter queues", func() bool { return rdb.Exists(t.Context(), name+":{"+name+"}:queue").Val() == 1 })
		for range 2 {
			if summary, _, order := picture(t, top); order[i] != name {
				t.Errorf("with a queue for %s it shows %s there: %s", name, order[i], summary)
			}
		}
	}
}

// A walk over very many keys takes many refreshes. A lock must not vanish for so long because it was free
// when it was looked at.
func TestTopGoesOnToLookAtALockThatIsFreeNow(t *testing.T) {
	rdb := redistest.Server(t).Client()
	fill := redis.NewScript(`for i = 1, 100000 do redis.call('SET', 'other:' .. i, 'x') end return 1`)
	if err := fill.Run(t.Context(), rdb, nil).Err(); err != nil {
		t.Fatal(err)
	}
	remember(t, rdb, "work%.0d", 1)
	hold(t, rdb, "work%.0d", 1)
	remember(t, rdb, "request:%d", topLooks-1)
	hold(t, rdb, "request:%d", topLooks-1)
	top := newTop(rdb, "", "*")
	for !top.walked {
		picture(t, top)
	}
	holds := func(want int) {
		t.Helper()
		if summary, rows, _ := picture(t, top); len(rows) != want || strings.Contains(summary, "more") {
			t.Errorf("of %d locks that are held it shows %d: %s", want, len(rows), summary)
		}
	}
	holds(topLooks)
	for i := range topLooks - 1 {
		rdb.Del(t.Context(), fmt.Sprint("request:", i))
	}
	for range 2 {
		holds(1)
		rdb.Del(t.Context(), "work")
		for range 5 { // which is more than one walk
			holds(0)
		}
		hold(t, rdb, "work%.0d", 1)
	}
	holds(1)

	// New locks take the place of those that have been free for the longest time.
	rdb.Del(t.Context(), "work")
	holds(0)
	remember(t, rdb, "new:%d", topLooks/2)
	hold(t, rdb, "new:%d", topLooks/2)
	for range 5 {
		picture(t, top)
	}
	hold(t, rdb, "work%.0d", 1)
	holds(1 + topLooks/2)
}

func TestTopShowsALockWhoseLastTokenIsGone(t *testing.T) {
	rdb := redistest.Server(t).Client()
	remember(t, rdb, "job%.0d", 1)
	hold(t, rdb, "job%.0d", 1)
	top := newTop(rdb, "", "*")
	for range 3 {
		if summary, rows, _ := picture(t, top); len(rows) != 1 {
			t.Errorf("of a held lock it shows %q: %s", rows["job"], summary)
		}
		rdb.Del(t.Context(), "job:{job}:meta")
	}
}

// A node of a Cluster refuses commands about several locks.
func TestTopOfAClusterKeepsOnlyLocksInUse(t *testing.T) {
	in := redistest.Server(t, "--cluster-enabled", "yes")
	if err := in.Client().Do(t.Context(), "CLUSTER", "ADDSLOTSRANGE", 0, 16383).Err(); err != nil {
		t.Skipf("%v; run it on Redis 7 or later, which takes slots by ranges", err)
	}
	eventually(t, "the Cluster serves", func() bool { return in.Client().Set(t.Context(), "other", 1, 0).Err() == nil })
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{in.Addr}})
	t.Cleanup(func() { cluster.Close() }) // after that of take
	remember(t, cluster, "free:%d", 5*topLooks)
	take(t, cluster, "", "a", "b", "{cart}:7")
	for _, c := range []struct {
		rdb     redis.UniversalClient
		refused int64 // commands of a walk
	}{{cluster, 0}, {in.Client(), 1}} {
		in.Client().ConfigResetStat(t.Context())
		top := newTop(c.rdb, "", "*")
		_, _, order := picture(t, top)
		if strings.Join(order, " ") != "a b {cart}:7" || len(top.locks) != 3 {
			t.Errorf("with %T: it shows %q, and knows %d locks", c.rdb, order, len(top.locks))
		}
		stats, err := in.Client().Info(t.Context(), "errorstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("errorstat_CROSSSLOT:count=%d\r\n", c.refused); strings.Contains(stats, "CROSSSLOT") != (c.refused > 0) || c.refused > 0 && !strings.Contains(stats, want) {
			t.Errorf("with %T: %s", c.rdb, stats)
		}
	}
}

func TestTopOfSeveralMastersShowsTheLocksOfAll(t *testing.T) {
	if testing.Short() {
		t.Skip("a Cluster takes seconds to start; run it without -short")
	}
	rdb := redistest.NewCluster(t).NewClient(t)
	remember(t, rdb, "free:%d", 5*topLooks)
	take(t, rdb, "", "a", "b", "c", "d", "e")
	top := newTop(rdb, "", "*")
	for range 2 {
		if _, _, order := picture(t, top); strings.Join(order, " ") != "a b c d e" || len(top.locks) != 5 {
			t.Errorf("it shows %q, and knows %d locks", order, len(top.locks))
		}
	}
}

// A node does not say whether a lock is in use while its slot moves.
func TestTopLooksAtALockOfWhichTheNodeSaysNothing(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	take(t, rdb, "", "job")
	m.Server().SetPreHook(func(p *server.Peer, cmd string, _ ...string) bool {
		refused := strings.EqualFold(cmd, "exists")
		if refused {
			p.WriteError("ASK 1 127.0.0.1:1")
		}
		return refused
	})
	defer m.Server().SetPreHook(nil)
	if summary, rows, _ := picture(t, newTop(rdb, "", "*")); len(rows) != 1 {
		t.Errorf("it shows %q: %s", rows["job"], summary)
	}
}
