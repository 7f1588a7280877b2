package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// The servers of a quorum are on machines of their own, with a network between them and the
// clients; on one machine, without a network, the processor bounds everything. So each server can
// be put behind a proxy that passes on what it reads half a round trip later, in both directions:
// see distance_linux.go. The proxies share a process of their own, so that their work is no part of
// the clients' processor time, and in a run all libraries go through the same proxies.
//
// In a real network servers are not all equally far away, and a lock that waits for all of them
// waits for the farthest. So a distance can be a range, over which the servers are spread evenly.

// proxyVariable is the environment variable that makes this program the proxies. It has the
// servers' addresses and their delays in one direction.
const proxyVariable = "LEASED_REDLOCK_PROXY"

// distance is the time that the network adds to a round trip, for the nearest of the servers and
// for the farthest.
type distance struct{ nearest, farthest time.Duration }

// parseDistance reads 1ms, or 600us-1400us.
func parseDistance(text string) (d distance, err error) {
	from, to, spread := strings.Cut(text, "-")
	if d.nearest, err = time.ParseDuration(from); err != nil || !spread {
		return distance{d.nearest, d.nearest}, err
	}
	if d.farthest, err = time.ParseDuration(to); err == nil && d.farthest < d.nearest {
		err = fmt.Errorf("the distance %q goes from far to near", text)
	}
	return d, err
}

// of returns the distance of server i of n.
func (d distance) of(i, n int) time.Duration {
	return d.nearest + (d.farthest-d.nearest)*time.Duration(i)/time.Duration(max(n-1, 1))
}

func (d distance) String() string {
	switch {
	case d.farthest == 0:
		return "loopback"
	case d.nearest == d.farthest:
		return duration(d.nearest)
	}
	return duration(d.nearest) + " to " + duration(d.farthest)
}

// proxyRole says which servers the proxies are for, and by how much each delays what it reads.
type proxyRole struct {
	Addrs  []string
	OneWay []time.Duration
}

// proxies is the process with the proxies of all servers.
type proxies struct {
	*child
	addrs []string
}

func startProxies(d distance, addrs []string) (*proxies, error) {
	role := proxyRole{Addrs: addrs}
	for i := range addrs {
		role.OneWay = append(role.OneWay, d.of(i, len(addrs))/2)
	}
	// The thread that delays is nearly always in the kernel, where the runtime's requests to
	// yield would only wake it up.
	c, err := startChild(proxyVariable, role, "GODEBUG=asyncpreemptoff=1")
	if err != nil {
		return nil, err
	}
	p := &proxies{child: c}
	if err := c.out.Decode(&p.addrs); err != nil {
		p.end()
		return nil, errors.Join(errors.New("the proxies ended"), err)
	}
	return p, nil
}

// proxy is the main function of the proxies.
func proxy(text string) error {
	var r proxyRole
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0) // the parent is done
	}()
	return delay(r.Addrs, r.OneWay, func(own []string) error { return json.NewEncoder(os.Stdout).Encode(own) })
}

// at sets the distance between clients and servers from now on, and measures it.
func (s *servers) at(d distance) error {
	if s.far != nil {
		s.far.end()
		s.far = nil
	}
	s.distance, s.addrs = d, s.near
	direct, err := pingTime(s.near[0])
	if err != nil {
		return err
	}
	fmt.Printf("\nDISTANCE %v: PING p50 %v without it\n", d, direct)
	if d.farthest == 0 {
		return nil
	}
	if s.far, err = startProxies(d, s.near); err != nil {
		return err
	}
	s.addrs = s.far.addrs
	for i, addr := range s.addrs {
		through, err := pingTime(addr)
		if err != nil {
			return err
		}
		fmt.Printf("  server %d: %v, %v more\n", i+1, through, through-direct)
	}
	return nil
}

// pingTime is the median time of a PING.
func pingTime(addr string) (time.Duration, error) {
	rdb := redis.NewClient(connectOptions(addr))
	defer rdb.Close()
	var times []time.Duration
	for range 500 {
		began := time.Now()
		if err := rdb.Ping(context.Background()).Err(); err != nil {
			return 0, err
		}
		times = append(times, time.Since(began))
	}
	return percentile(times, 50), nil
}
