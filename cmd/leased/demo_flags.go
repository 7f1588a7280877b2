package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased/internal/protocol"
)

// demoOptions are the demo's flags.
type demoOptions struct {
	at                     address // without an address, the embedded server is used
	workers, buyers, stock int
	ttl                    time.Duration
	kill                   bool
	fence                  bool
	quorum                 bool
}

const (
	usualTTL = protocol.DefaultTTL
	killTTL  = 2 * time.Second // short enough to watch it expire

	quorumTTL = 6 * time.Second // a third of it, after which a lease is renewed, is short enough to wait for
)

func demoCommand(std streams) *cobra.Command {
	var o demoOptions
	c := &cobra.Command{
		Use:   "demo",
		Short: "Sell a stock to buyers in several processes, without a lock and with it",
		Long: "Sells a stock to buyers in several processes, without a lock and with it. It needs no Redis: one is inside this program. " +
			"With --fence it makes two owners of one lock on purpose, and shows what fencing tokens do about that. " +
			"With --quorum the lock is on five servers, two of which die in the middle of the sale, and come back empty.",
		Args: noArguments,
	}
	c.RunE = interruptible(func(ctx context.Context, _ []string) error {
		if o.kill && !c.Flags().Changed("ttl") {
			o.ttl = killTTL
		}
		if o.quorum && !c.Flags().Changed("ttl") {
			o.ttl = quorumTTL
		}
		if err := o.check(); err != nil {
			return err
		}
		if !o.fence {
			return runDemo(ctx, std, o)
		}
		for _, name := range []string{"kill", "quorum", "workers", "buyers", "ttl"} {
			if c.Flags().Changed(name) {
				return usagef("--fence has two owners that take turns, so --%s has no meaning with it", name)
			}
		}
		return runFenceDemo(ctx, std, o)
	})
	o.bind(c)
	return c
}

func (o *demoOptions) bind(c *cobra.Command) {
	// The environment is not consulted: a demonstration is no reason to write to somebody's Redis.
	o.at.bindServer(c, "`ADDRESS` of a real server; the default is one inside this program")
	f := c.Flags()
	f.IntVar(&o.workers, "workers", 5, "`N` processes")
	f.IntVar(&o.buyers, "buyers", 10, "`N` buyers in each process")
	f.IntVar(&o.stock, "stock", 10, "`N` pieces to sell")
	f.DurationVar(&o.ttl, "ttl", usualTTL, fmt.Sprintf("`DURATION` of a lease; if not given, %v with --kill, %v with --quorum, and otherwise the default", killTTL, quorumTTL))
	f.BoolVar(&o.kill, "kill", false, "kill a process while it is inside the lock")
	f.BoolVar(&o.quorum, "quorum", false, "the lock is on five servers, two of which die and come back empty")
	f.BoolVar(&o.fence, "fence", false, "two owners at once, without fencing tokens and with them")
}

// check returns the first mistake. The upper limits are what a small machine can do within seconds.
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
	if o.quorum {
		return o.checkQuorum()
	}
	return nil
}
