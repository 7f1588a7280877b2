package main

import (
	"cmp"
	"context"
	"strconv"
	"sync"

	"github.com/redis/go-redis/v9"
)

// What looks like one server may be a proxy, or a name, that leads each connection to another one. If two
// of those accept writes, each gives a lock to an owner of its own, and no error tells of it.

// probes is how many connections are asked where they lead. If each leads to one of two servers by chance,
// all lead to the same one in 1 of 2,048 cases.
const probes = 12

// spareConnections returns how many connections may be asked on a server of which INFO says this: no more than
// half of those that it would still accept, because others need some, too.
func spareConnections(info map[string]string) int {
	most, err := strconv.Atoi(info["maxclients"])
	used, err2 := strconv.Atoi(info["connected_clients"])
	if err != nil || err2 != nil {
		return probes
	}
	return min(probes, max(0, most-used)/2)
}

// whereConnectionsLead returns what INFO says on each of n connections that are open at the same time, and the
// first error.
func whereConnectionsLead(ctx context.Context, node *redis.Client, n int) (infos []map[string]string, failed error) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	answers, failures := make([]map[string]string, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		conn := node.Conn()
		defer conn.Close() // not before all have answered, or the next one would get the same connection
		// Ends with ctx; waited for below.
		all.Go(func() { answers[i], failures[i] = serverInfo(ctx, conn) })
	}
	all.Wait()
	for i, info := range answers {
		if failures[i] == nil {
			infos = append(infos, info)
		}
	}
	return infos, cmp.Or(failures...)
}

// serversFinding says whether all connections lead to one server.
func serversFinding(infos []map[string]string, failed error) finding {
	const what = "servers"
	accept := map[string]bool{} // by run_id: it accepts writes
	for _, info := range infos {
		if id := info["run_id"]; id != "" {
			accept[id] = accept[id] || info["role"] != "slave" || info["slave_read_only"] == "0"
		}
	}
	writable := 0
	for _, accepts := range accept {
		if accepts {
			writable++
		}
	}
	connections := count(len(infos), "connection", "connections")
	found := connections + " led to " + count(len(accept), "server", "servers")
	unknown := finding{verdictUnknown, what, "the server does not tell", "Whether all connections lead to one server is not checked.", ""}
	switch {
	case writable > 1:
		return finding{verdictBad, what, found + ", and " + count(writable, "accepts", "accept") + " writes", "Unless they are front ends of one database, each gives locks without asking the others: then a lock " +
			"can have two owners at any time, and nothing tells of it.", "have the proxy, or the name, lead all connections to one primary, or connect to that itself"}
	case len(accept) > 1:
		return finding{verdictNote, what, found + ", and " + count(writable, "accepts", "accept") + " writes", "Commands that reach a replica are refused, and messages go astray: who waits for a lock may get it late, " +
			"and out of turn.", "connect to the primary itself"}
	case len(infos) < 2 && failed != nil:
		unknown.found = "no other connection had an answer: " + failed.Error()
		return unknown
	case len(accept) == 0:
		return unknown
	}
	return finding{verdictOK, what, found, "", ""}
}
