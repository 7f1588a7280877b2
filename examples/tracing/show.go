package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/examples/tracing/internal/query"
)

const (
	processes = 3
	customers = 2 // of each process
	item      = "mug"
	showFor   = 2 * time.Minute // everything but building and --keep
)

// show is one run of the program. Its methods belong to one goroutine.
type show struct {
	options options
	screen  *screen
	stderr  io.Writer

	prefix   string
	redis    string // URL
	otlp     string
	jaeger   query.Jaeger // without a URL there is nobody to ask
	rdb      *redis.Client
	services []*service
	ends     []func() error // of all that was started, to be called in reverse
}

// perform does everything. After it, also after an error, end has to be called.
func (s *show) perform(ctx context.Context) error {
	s.screen.line("%d processes of an order service contend for one stock lock.", processes)
	if s.options.otlp == "" {
		if err := buildJaeger(ctx, s.screen.progress); err != nil {
			return err
		}
	}
	bounded, cancel := context.WithTimeout(ctx, showFor)
	defer cancel()
	if err := s.start(bounded); err != nil {
		return err
	}
	began := time.Now()
	if err := s.sell(bounded); err != nil {
		return err
	}
	if err := s.explain(bounded, began); err != nil {
		return err
	}
	if !s.options.keep {
		return nil
	}
	s.screen.line("\nJaeger stays at %s until Ctrl-C. Its page there is a placeholder, as always when it", s.jaeger.URL)
	s.screen.line("is built as a Go module; for the real one use compose.yaml. What it answers is real:")
	s.screen.line("    %s/api/traces?service=%s", s.jaeger.URL, serviceName)
	<-ctx.Done()
	return nil
}

// start starts what is not there yet, and tells what there is.
func (s *show) start(ctx context.Context) error {
	s.prefix = "leased-tracing:" + strings.ToLower(rand.Text()[:12]) + ":"
	s.otlp, s.jaeger.URL = s.options.otlp, strings.TrimSuffix(s.options.jaeger, "/")
	if s.otlp == "" {
		s.screen.progress("   starting Jaeger")
		j, err := startJaeger(ctx)
		if err != nil {
			return err
		}
		s.ends = append(s.ends, j.end)
		s.otlp, s.jaeger.URL = j.otlp, j.url
	}
	s.screen.line("   traces go to    %s", s.otlp)
	if s.jaeger.URL != "" {
		s.screen.line("   Jaeger answers  %s", s.jaeger.URL)
	}
	var what string
	if s.redis = s.options.redis; s.redis == "" {
		var end func() error
		var err error
		if s.redis, what, end, err = startRedis(ctx); err != nil {
			return err
		}
		s.ends = append(s.ends, end)
	}
	var err error
	if s.rdb, err = connect(ctx, s.redis); err != nil {
		return err
	}
	if what == "" {
		what = s.rdb.Options().Addr // without a password
	}
	s.ends = append(s.ends, s.tidy)
	s.screen.line("   Redis           %s", what)
	for i := range processes {
		c, err := startService(ctx, s.stderr, setup{
			Instance: fmt.Sprintf("%s-%d", serviceName, i+1),
			Redis:    s.redis, OTLP: s.otlp, Prefix: s.prefix, Think: s.options.think,
		})
		if err != nil {
			return err
		}
		s.services = append(s.services, c)
		s.ends = append(s.ends, c.end)
		s.screen.line("   %s        http://%s%s, process %d", c.name, c.address, orderPath, c.cmd.Process.Pid)
	}
	return nil
}

// end ends what was started, the last first: the services before their Redis.
func (s *show) end() error {
	var errs []error
	for i := len(s.ends) - 1; i >= 0; i-- {
		errs = append(errs, s.ends[i]())
	}
	return errors.Join(errs...)
}

// tidy deletes the stock from a Redis that stays. The locks' keys expire by themselves.
func (s *show) tidy() error {
	defer s.rdb.Close()
	if s.options.redis == "" {
		return nil
	}
	// The user may have interrupted everything else, not this.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := s.rdb.Del(ctx, stockKey(s.prefix, item)).Err(); err != nil {
		return fmt.Errorf("cannot delete %s, which expires within %v: %w", stockKey(s.prefix, item), stockLife, err)
	}
	return nil
}

// service is a process of the order service, seen by its parent.
type service struct {
	*child
	address string
}

// startService starts this program again, and returns when it serves.
func startService(ctx context.Context, stderr io.Writer, s setup) (*service, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("cannot start myself again: %w", err)
	}
	cmd := exec.Command(program, serveCommand) //nolint:noctx // ended by end
	orders, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	first := &firstLine{line: make(chan []byte, 1)}
	cmd.Stdout, cmd.Stderr = first, stderr
	c, err := launch(s.Instance, cmd, orders.Close)
	if err != nil {
		return nil, err
	}
	err = json.NewEncoder(orders).Encode(s)
	if err == nil {
		var g greeting
		select {
		case line := <-first.line:
			if err = json.Unmarshal(line, &g); err == nil {
				return &service{c, g.Address}, nil
			}
		case <-c.done:
			err = errors.New("it ended while starting")
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return nil, errors.Join(fmt.Errorf("%s does not serve: %w", s.Instance, err), c.end())
}
