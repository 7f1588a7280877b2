package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Redis runs one command at a time, so all locks wait while one runs. A few questions in a row miss one that
// comes now and then, and the server's own statistics do not.

const (
	slowCommand = 50 * time.Millisecond // a command that takes longer is told
	enoughCalls = 10                    // fewer say nothing of what is usual
)

// blocking are the commands whose clients are blocked while others are served. Some versions count that time
// as the command's.
var blocking = []string{"blpop", "brpop", "brpoplpush", "blmove", "blmpop", "bzpopmin", "bzpopmax", "bzmpop", "xread", "xreadgroup", "wait", "waitaof"}

// usage is what a server says of a command since it was started, or since CONFIG RESETSTAT.
type usage struct {
	command string
	calls   int
	each    time.Duration // on average
	some    time.Duration // what at least enoughCalls took, as far as it tells
}

// commandsFinding says which commands are slow. Locks need no right to ask for that, so without an answer it
// returns false.
func commandsFinding(ctx context.Context, node redis.Cmdable) (f finding, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	stats, err := node.Info(ctx, "commandstats").Result()
	if err != nil {
		return finding{}, false
	}
	latencies := node.Info(ctx, "latencystats").Val() // nothing before Redis 7
	used := usagesOf(stats, latencies)
	if len(used) == 0 {
		return finding{}, false
	}
	return slowFinding(used), true
}

// usagesOf parses INFO commandstats and latencystats.
func usagesOf(stats, latencies string) (used []usage) {
	percentiles := statsOf(latencies, "latency_percentiles_usec_")
	for command, fields := range statsOf(stats, "cmdstat_") {
		u := usage{command: strings.ReplaceAll(command, "|", " "), calls: int(fields["calls"]), each: microseconds(fields["usec_per_call"])}
		for name, took := range percentiles[command] {
			p, err := strconv.ParseFloat(strings.TrimPrefix(name, "p"), 64)
			// Locks run many short scripts, beside which those of others hardly show in the average.
			if slower := fields["calls"] * (100 - p) / 100; err == nil && slower >= enoughCalls {
				u.some = max(u.some, microseconds(took))
			}
		}
		used = append(used, u)
	}
	return used
}

// statsOf parses a section of INFO whose lines are a prefix, a command, a colon, and numbers with names.
func statsOf(section, prefix string) map[string]map[string]float64 {
	stats := map[string]map[string]float64{}
	for line := range strings.Lines(section) {
		line, ours := strings.CutPrefix(strings.TrimSpace(line), prefix)
		command, fields, found := strings.Cut(line, ":")
		if !ours || !found {
			continue
		}
		stats[command] = map[string]float64{}
		for field := range strings.SplitSeq(fields, ",") {
			name, text, _ := strings.Cut(field, "=")
			if number, err := strconv.ParseFloat(text, 64); err == nil {
				stats[command][name] = number
			}
		}
	}
	return stats
}

func microseconds(n float64) time.Duration { return time.Duration(n * float64(time.Microsecond)) }

func slowFinding(used []usage) finding {
	const what = "commands"
	slow := slices.DeleteFunc(slices.Clone(used), func(u usage) bool {
		return max(u.each, u.some) <= slowCommand || u.calls < enoughCalls || slices.Contains(blocking, strings.ToLower(u.command))
	})
	if len(slow) == 0 {
		return finding{verdictOK, what, fmt.Sprintf("none took more than %v on average, or in many calls", slowCommand), "", ""}
	}
	slices.SortFunc(slow, func(a, b usage) int {
		return cmp.Or(cmp.Compare(max(b.each, b.some), max(a.each, a.some)), cmp.Compare(a.command, b.command))
	})
	var texts []string
	for _, u := range slow[:min(len(slow), 3)] {
		calls := count(u.calls, "call", "calls")
		if u.each > slowCommand {
			texts = append(texts, fmt.Sprintf("%s took %v on average of %s", u.command, u.each.Round(time.Millisecond), calls))
		} else {
			texts = append(texts, fmt.Sprintf("%s took %v and more in some of %s", u.command, u.some.Round(time.Millisecond), calls))
		}
	}
	if more := len(slow) - len(texts); more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return finding{verdictNote, what, strings.Join(texts, "; "), "This counts from the start of the server, or from CONFIG RESETSTAT. While one of these runs, all locks wait.",
		"SLOWLOG GET shows which client sends it; split it, or move it to another Redis"}
}
