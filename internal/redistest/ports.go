package redistest

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"
)

// A port on which a test's server has listened goes to no other server soon, of this process or of
// another that tests at the same time. A client of a server that was killed continues to dial its
// port, and would otherwise lock, subscribe and be redirected on a stranger's server.
//
// So each process has a share of the ports to itself, and remembers which of them it has used.

const (
	// Ports are below the range from which systems take the local ports of outgoing connections (from
	// 32,768 on Linux, 49,152 elsewhere). In that range, a port on which nobody has listened for a
	// while might not be available again: a client that keeps dialing it would sooner or later get it
	// as its own local port, or even connect to itself.
	firstPort, endOfPorts = 15_000, 30_000

	// The bus of a Cluster listens on the node's port plus this, in every version. The bus ports are
	// below that range, too.
	busDelta        = 10_000
	endOfNodesPorts = endOfPorts - 8_000

	// A share is every eighth port. As eight divides busDelta, a node's two ports are of one share.
	shares = 8
	// A process has share n for as long as it listens on firstGuard + n.
	firstGuard = firstPort - shares
)

// FreePort returns a loopback port on which nobody listened a moment ago.
func FreePort() (int, error) {
	l, err := listen()
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// listen takes a free loopback port.
func listen() (net.Listener, error) {
	var l net.Listener
	err := errors.New("redistest: no free port")
	for range 1000 {
		port := anyPort(endOfPorts)
		if !claim(port) {
			continue
		}
		if l, err = listenOn(port); err == nil {
			return l, nil
		}
	}
	return nil, err
}

// clusterPort is FreePort for a node of a Cluster, which needs a second port.
func clusterPort() (int, error) {
	for range 1000 {
		port := anyPort(endOfNodesPorts)
		if !claim(port) || !claim(port+busDelta) {
			continue
		}
		a, err := listenOn(port)
		if err != nil {
			continue
		}
		b, err := listenOn(port + busDelta)
		_ = a.Close()
		if err == nil {
			return port, b.Close()
		}
	}
	return 0, errors.New("redistest: no two free ports for a node of a cluster")
}

func listenOn(port int) (net.Listener, error) {
	return net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
}

// anyPort returns a port of this process's share.
func anyPort(end int) int {
	share, _ := ownShare()
	if share < 0 { // more processes than shares
		share = rand.N(shares)
	}
	return firstPort + rand.N((end-firstPort)/shares)*shares + share
}

// ownShare returns this process's share, and what keeps it until the process ends.
var ownShare = sync.OnceValues(func() (int, net.Listener) { return takeShare(firstGuard) })

// takeShare returns a share that nobody has, and the listener that keeps it; or -1 if there is none.
// The guards are the ports from first on.
func takeShare(first int) (int, net.Listener) {
	for _, n := range rand.Perm(shares) {
		if guard, err := listenOn(first + n); err == nil {
			return n, guard
		}
	}
	return -1, nil
}

// claim reports whether this process may use a port, and if so keeps the port from its other servers
// for some minutes: a server that a test has killed is to start again on its own.
func claim(port int) bool {
	const kept = 3 * time.Minute
	claimed.Lock()
	defer claimed.Unlock()
	if at, ok := claimed.at[port]; ok && time.Since(at) < kept {
		return false
	}
	claimed.at[port] = time.Now()
	return true
}

var claimed = struct {
	sync.Mutex
	at map[int]time.Time
}{at: map[int]time.Time{}}
