package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// quiet keeps go-redis from writing its own log lines between ours: what matters of
// them comes back as errors.
func quiet() { logging.Disable() }

// connect returns a client for the server at rawURL, which has answered.
func connect(ctx context.Context, rawURL string) (*redis.Client, error) {
	options, err := redis.ParseURL(rawURL)
	if err != nil {
		return nil, usagef("--redis is not a Redis URL such as redis://localhost:6379/0") // err quotes parts of it, perhaps a password
	}
	options.ContextTimeoutEnabled = true // the locks bound every command by its context
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	options.DialerRetries = 1 // a server that is not there should be reported soon
	rdb := redis.NewClient(options)
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := rdb.Ping(ctx).Err(); err != nil {
		rdb.Close()
		return nil, fmt.Errorf("no Redis at %s: %w", options.Addr, err)
	}
	return rdb, nil
}

// startRedis starts a Redis on a loopback port that keeps nothing on disk: a real one
// if redis-server is in PATH, else one inside this program. It returns its URL, what
// to tell the user, and what ends it.
func startRedis(ctx context.Context) (address, what string, end func() error, err error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		if err := m.Start(); err != nil {
			return "", "", nil, fmt.Errorf("cannot start the embedded Redis: %w", err)
		}
		return "redis://" + m.Addr(), m.Addr() + ", embedded: there is no redis-server in PATH", func() error { m.Close(); return nil }, nil
	}
	var c *child
	err = onFreePorts(1, func(free []string) error {
		_, port, _ := net.SplitHostPort(free[0])
		server, err := launch("redis-server", exec.Command(program, "--bind", "127.0.0.1", "--port", port, //nolint:noctx // ended by end
			"--save", "", "--appendonly", "no"), nil)
		if err != nil {
			return err
		}
		c, address = server, free[0]
		return c.await(ctx, 10*time.Second, func(ctx context.Context) error {
			rdb, err := connect(ctx, "redis://"+address)
			if err == nil {
				rdb.Close()
			}
			return err
		})
	})
	if err != nil {
		if c != nil {
			err = errors.Join(err, c.end())
		}
		return "", "", nil, err
	}
	return "redis://" + address, address + ", " + program, c.end, nil
}
