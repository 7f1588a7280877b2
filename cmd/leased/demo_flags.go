package main

import (
	"io"
	"time"
)

// demoOptions are the demo's flags.
type demoOptions struct {
	url                    string // empty: the embedded server
	workers, buyers, stock int
	ttl                    time.Duration
	kill                   bool
}

const (
	usualTTL = 30 * time.Second
	killTTL  = 2 * time.Second // short enough to watch it expire
)

// parseDemo returns the options. done means that the user asked for help and got it.
func parseDemo(out io.Writer, args []string) (o demoOptions, done bool, err error) {
	flags := newFlags("demo")
	flags.StringVar(&o.url, "redis", "", "`URL` of a real server (default: one inside this program)")
	flags.IntVar(&o.workers, "workers", 5, "`N` processes (default 5)")
	flags.IntVar(&o.buyers, "buyers", 10, "`N` buyers in each process (default 10)")
	flags.IntVar(&o.stock, "stock", 10, "`N` pieces to sell (default 10)")
	flags.DurationVar(&o.ttl, "ttl", usualTTL, "`LENGTH` of a lease (default 30s, with --kill 2s)")
	flags.BoolVar(&o.kill, "kill", false, "kill a process while it is inside the lock")
	if done, err := flags.parse(out, args); done || err != nil {
		return o, done, err
	}
	if len(flags.words) > 0 {
		return o, false, usagef("demo takes no arguments, only flags: what is %q?", flags.words[0])
	}
	if o.kill && !flags.given("ttl") {
		o.ttl = killTTL
	}
	return o, false, o.check()
}

// check returns the first mistake. The upper limits are what a small machine can do within
// seconds.
func (o *demoOptions) check() error {
	for _, n := range []struct {
		name       string
		value, max int
	}{
		{"workers", o.workers, 50},
		{"buyers", o.buyers, 200},
		{"stock", o.stock, 1000},
	} {
		if n.value < 1 || n.value > n.max {
			return usagef("--%s must be from 1 to %d, not %d", n.name, n.max, n.value)
		}
	}
	switch {
	case o.ttl < 100*time.Millisecond || o.ttl > time.Minute || o.ttl%time.Millisecond != 0:
		return usagef("--ttl must be whole milliseconds from 100ms to 1m, not %v", o.ttl)
	case o.kill && o.workers < 2:
		return usagef("--kill needs --workers 2 or more: a process has to survive")
	}
	return nil
}
