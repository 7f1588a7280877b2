package main

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

// relay listens, and passes the nth connection, from 0, on to the server that lead names. What that replies
// goes through replies. It returns its address.
func relay(t *testing.T, lead func(n int) string, replies func(to io.Writer, from io.Reader)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	var mu sync.Mutex // guards the fields below
	var conns []net.Conn
	closed := false
	keep := func(c net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		if conns = append(conns, c); closed {
			c.Close()
		}
	}
	// Ended by the closing of l, and each connection by that of either end; waited for in the cleanup.
	running.Go(func() {
		for n := 0; ; n++ {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", lead(n))
			if err != nil {
				client.Close()
				continue
			}
			keep(client)
			keep(server)
			running.Go(func() {
				_, _ = io.Copy(server, client)
				server.Close()
			})
			running.Go(func() {
				replies(client, server)
				client.Close()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		closed = true
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return l.Addr().String()
}

func whole(to io.Writer, from io.Reader) { _, _ = io.Copy(to, from) }

// short passes replies on until one is longer than a packet that gets through. From there on the connection
// is silent, because TCP sends that packet again and again.
func short(to io.Writer, from io.Reader) {
	packet := make([]byte, 1<<16)
	for {
		n, err := from.Read(packet)
		if err != nil || n > 1200 {
			break
		}
		if _, err := to.Write(packet[:n]); err != nil {
			return
		}
	}
	_, _ = io.Copy(io.Discard, from)
}

// Nothing else tells of it: each of the servers gives the lock, and none of them has an error.
func TestDoctorFindsAProxyThatSpreadsConnectionsOverServersThatAcceptWrites(t *testing.T) {
	servers := []string{redistest.Server(t).Addr, redistest.Server(t).Addr}
	spread := relay(t, func(n int) string { return servers[n%len(servers)] }, whole)
	got := invoke(t, "doctor", "--redis", spread)
	text := strings.Join(strings.Fields(got.out), " ")
	if got.status != 1 || !strings.Contains(got.out, "\nbad   servers      12 connections led to 2 servers, and 2 accept writes\n") ||
		!strings.Contains(text, "then a lock can have two owners") || !strings.Contains(got.out, "?     lock         not tried") {
		t.Errorf("%+v", got)
	}
	one := relay(t, func(int) string { return servers[0] }, whole)
	if got := invoke(t, "doctor", "--redis", one); got.status != 0 || !strings.Contains(got.out, "ok    servers      12 connections led to 1 server\n") {
		t.Errorf("through a proxy with one server: %+v", got)
	}
}

func TestDoctorTellsServersThatGiveLocksFromTheirReplicas(t *testing.T) {
	primary := map[string]string{"run_id": "a", "role": "master"}
	other := map[string]string{"run_id": "b", "role": "master"}
	replica := map[string]string{"run_id": "c", "role": "slave", "slave_read_only": "1"}
	writable := map[string]string{"run_id": "d", "role": "slave", "slave_read_only": "0"}
	lost := errors.New("read tcp: i/o timeout")
	for _, c := range []struct {
		infos   []map[string]string
		failed  error
		verdict verdict
		found   string
	}{
		{[]map[string]string{primary, primary}, nil, verdictOK, "2 connections led to 1 server"},
		{[]map[string]string{primary, primary}, lost, verdictOK, "2 connections led to 1 server"},
		{[]map[string]string{primary, primary, other}, nil, verdictBad, "3 connections led to 2 servers, and 2 accept writes"},
		{[]map[string]string{primary, replica}, nil, verdictNote, "2 connections led to 2 servers, and 1 accepts writes"},
		{[]map[string]string{primary, writable}, nil, verdictBad, "2 connections led to 2 servers, and 2 accept writes"},
		{[]map[string]string{{"role": "master"}, {"role": "master"}}, nil, verdictUnknown, "does not tell"},
		{[]map[string]string{primary}, lost, verdictUnknown, lost.Error()},
		{nil, lost, verdictUnknown, lost.Error()},
	} {
		f := serversFinding(c.infos, c.failed)
		if f.verdict != c.verdict || !strings.Contains(f.found, c.found) || f.verdict != verdictOK && f.means == "" {
			t.Errorf("%v, %v: %+v", c.infos, c.failed, f)
		}
	}
}

// Twelve connections would take the last ones of a small server from those that use it, and from doctor's own locks.
func TestDoctorLeavesConnectionsToOthers(t *testing.T) {
	for _, c := range []struct {
		most, used string
		want       int
	}{
		{"10000", "5", probes},
		{"16", "2", 7},
		{"10", "8", 1},
		{"10", "10", 0},
		{"10", "12", 0},
		{"", "5", probes}, // the server does not tell
	} {
		if n := spareConnections(map[string]string{"maxclients": c.most, "connected_clients": c.used}); n != c.want {
			t.Errorf("%s of %s are used: %d are asked, want %d", c.used, c.most, n, c.want)
		}
	}
	in := redistest.Server(t, "--maxclients", "8")
	if got := invoke(t, "doctor", "--redis", in.Addr); got.status != 0 || !strings.Contains(got.out, "ok    hand-off") {
		t.Errorf("%+v", got)
	}
}

// An answer that is lost is no refusal, and to allow what is allowed would not help.
func TestAnAnswerThatIsLostOnTheWayIsNotCalledARefusal(t *testing.T) {
	in := redistest.Server(t)
	addr := relay(t, func(int) string { return in.Addr }, short)
	remember(t, in.Client(), "a request with a rather long name:%d", 100)
	t.Run("doctor", func(t *testing.T) {
		t.Parallel()
		got := invoke(t, "doctor", "--redis", addr)
		if got.status != 0 || !strings.Contains(got.out, "?     INFO         its answer did not arrive: ") || strings.Contains(got.out, "+info") ||
			!strings.Contains(strings.Join(strings.Fields(got.out), " "), "large packets may be lost") || !strings.Contains(got.out, "ok    hand-off") {
			t.Errorf("%+v", got)
		}
	})
	t.Run("ls", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // it would try for 20 s
		defer cancel()
		o := listOptions{at: address{Redis: addr}, pattern: "*", limit: 10}
		err := list(ctx, discard(), &o)
		if want := "Redis at " + addr + ": it did not answer in time ("; err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	})
}

// What has named the server already is not said twice.
func TestAnErrorNamesTheServerOnce(t *testing.T) {
	at := address{place: "cache:6379"}
	for _, c := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, "Redis at cache:6379: it did not answer in time (context deadline exceeded)"},
		{refusal("NOAUTH Authentication required."), "Redis at cache:6379: it requires a password: "},
		{errors.New("something else"), "something else"},
		{named{errors.New("no Redis at node:6379, which is a master of the Cluster: it did not answer in time")}, "no Redis at node:6379, "},
		{named{context.DeadlineExceeded}, "context deadline exceeded"},
	} {
		if got := at.explain(c.err); !strings.HasPrefix(got.Error(), c.want) || !errors.Is(got, c.err) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
