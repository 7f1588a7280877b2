package redistest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Tally counts commands by name, in lower case.
type Tally map[string]int64

// Calls asks a real server how often each command has run since the server started.
// Commands that a script calls count too, in addition to the script's own evalsha. The
// INFO that asks is not counted. Commands of other clients are, so use a server that
// nobody else uses. The embedded server does not keep these counts.
func Calls(ctx context.Context, rdb redis.Cmdable) (Tally, error) {
	info, err := rdb.Info(ctx, "commandstats").Result()
	if err != nil {
		return nil, fmt.Errorf("redistest: commandstats: %w", err)
	}
	t := Tally{}
	for line := range strings.Lines(info) {
		line, ok := strings.CutPrefix(strings.TrimSpace(line), "cmdstat_")
		if !ok {
			continue
		}
		name, stats, _ := strings.Cut(line, ":")
		calls, _, _ := strings.Cut(strings.TrimPrefix(stats, "calls="), ",")
		n, err := strconv.ParseInt(calls, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("redistest: commandstats %q: %w", line, err)
		}
		if name != "info" {
			t[name] = n
		}
	}
	return t, nil
}

// Sub returns what was counted after before was taken. Commands that did not run are absent.
func (t Tally) Sub(before Tally) Tally {
	since := Tally{}
	for name, n := range t {
		if d := n - before[name]; d != 0 {
			since[name] = d
		}
	}
	return since
}

// Total returns the number of all commands together.
func (t Tally) Total() int64 {
	var sum int64
	for _, n := range t {
		sum += n
	}
	return sum
}

// Counter is a go-redis hook that counts what a client sends: rdb.AddHook(&counter).
// The zero value is ready to use. Of a connection's handshake only the dial is counted,
// and the dial is also all that a hook sees of a subscription.
type Counter struct {
	// mu guards the fields below and is never held while a command runs.
	mu        sync.Mutex
	byName    Tally
	single    int64
	pipelines int64
	dials     int64
}

var _ redis.Hook = (*Counter)(nil)

// Commands returns the counts by name, including commands within pipelines. A command is
// counted once, when it is sent, however often go-redis retries it.
func (c *Counter) Commands() Tally {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.byName)
}

// Trips returns the number of round trips: a single command is one, and so is a pipeline.
func (c *Counter) Trips() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.single + c.pipelines
}

// Pipelines returns the number of pipelines and transactions.
func (c *Counter) Pipelines() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pipelines
}

// Dials returns the number of attempts to connect.
func (c *Counter) Dials() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dials
}

// Reset sets all counts to zero.
func (c *Counter) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byName, c.single, c.pipelines, c.dials = nil, 0, 0, 0
}

// DialHook implements [redis.Hook].
func (c *Counter) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c.mu.Lock()
		c.dials++
		c.mu.Unlock()
		return next(ctx, network, addr)
	}
}

// ProcessHook implements [redis.Hook].
func (c *Counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.mu.Lock()
		if c.countLocked(cmd) {
			c.single++
		}
		c.mu.Unlock()
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements [redis.Hook].
func (c *Counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.mu.Lock()
		counted := false
		for _, cmd := range cmds {
			counted = c.countLocked(cmd) || counted
		}
		if counted {
			c.pipelines++
		}
		c.mu.Unlock()
		return next(ctx, cmds)
	}
}

// countLocked counts cmd. It reports false, and does not count, if cmd is one that go-redis
// sends by itself on a new connection.
func (c *Counter) countLocked(cmd redis.Cmder) bool {
	switch cmd.Name() {
	case "hello", "auth", "client", "select", "readonly":
		return false
	}
	if c.byName == nil {
		c.byName = Tally{}
	}
	c.byName[cmd.Name()]++
	return true
}
