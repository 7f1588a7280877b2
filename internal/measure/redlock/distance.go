package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
)

// Servers of a quorum are on machines of their own, with a network between them and the clients;
// on one machine without it, everything is bound by the processor. So each server can be put
// behind a proxy that hands on what it reads half a round trip later, in both directions: see
// distance_linux.go. The proxies are one process of their own, so that what they do is no part of
// the clients' processor time, and all libraries go through the same ones in the same run.

// proxyVariable has the delay one way and the servers' addresses, and makes this program the
// proxies.
const proxyVariable = "LEASED_REDLOCK_PROXY"

type proxyRole struct {
	OneWay time.Duration
	Addrs  []string
}

// proxies are those before all servers.
type proxies struct {
	*child
	addrs []string
}

func startProxies(rtt time.Duration, addrs []string) (*proxies, error) {
	// The thread that delays is in the kernel nearly always, where the runtime's requests to
	// yield would only wake it.
	c, err := startChild(proxyVariable, proxyRole{rtt / 2, addrs}, "GODEBUG=asyncpreemptoff=1")
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
	return delay(r.OneWay, r.Addrs, func(own []string) error { return json.NewEncoder(os.Stdout).Encode(own) })
}

// at sets the distance at which clients find the servers from now on, and measures it.
func (s *servers) at(rtt time.Duration) error {
	if s.far != nil {
		s.far.end()
		s.far = nil
	}
	s.rtt, s.addrs = rtt, s.near
	direct, err := pingTime(s.near[0])
	if err != nil {
		return err
	}
	if rtt == 0 {
		fmt.Printf("\nDISTANCE 0: PING p50 %v\n", direct)
		return nil
	}
	if s.far, err = startProxies(rtt, s.near); err != nil {
		return err
	}
	s.addrs = s.far.addrs
	through, err := pingTime(s.addrs[0])
	if err != nil {
		return err
	}
	fmt.Printf("\nDISTANCE %v: PING p50 %v through the proxy, %v without: %v more\n", rtt, through, direct, through-direct)
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
	return at(times, 50), nil
}
