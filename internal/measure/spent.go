package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// spent is how many commands the server carried out, and how long they took. Only commands that
// clients send are counted: what a script calls is part of the script's time.
type spent struct {
	calls int64
	time  time.Duration
}

// spend returns what the server has spent on the named commands since it started. No script may
// call one of them in the time that is measured, because Redis counts such calls, too.
func spend(ctx context.Context, rdb *redis.Client, names ...string) (spent, error) {
	info, err := rdb.Info(ctx, "commandstats").Result()
	if err != nil {
		return spent{}, err
	}
	var s spent
	for line := range strings.Lines(info) {
		name, numbers, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "cmdstat_"), ":")
		for _, wanted := range names {
			var calls, us int64
			if name != wanted {
				continue
			}
			if _, err := fmt.Sscanf(numbers, "calls=%d,usec=%d", &calls, &us); err != nil {
				return s, err
			}
			s.calls += calls
			s.time += time.Duration(us) * time.Microsecond
		}
	}
	return s, nil
}

func (s spent) sub(before spent) spent { return spent{s.calls - before.calls, s.time - before.time} }

func (s spent) add(more spent) spent { return spent{s.calls + more.calls, s.time + more.time} }

// each is the time spent on each of n.
func (s spent) each(n int) string {
	return fmt.Sprintf("%.1fµs", float64(s.time.Nanoseconds())/1000/float64(max(n, 1)))
}
