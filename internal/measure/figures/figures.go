// Package figures has what the programs that measure locks make of their samples, and what
// they ask a server for.
package figures

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Quantile returns the sample that a share q of all samples is below, or the zero value if there
// are no samples: of an even number, Quantile(s, .5) is the upper of the two in the middle. It
// leaves the order of the samples as it is.
func Quantile[T cmp.Ordered](samples []T, q float64) T {
	if len(samples) == 0 {
		var zero T
		return zero
	}
	s := slices.Sorted(slices.Values(samples))
	return s[min(len(s)-1, int(q*float64(len(s))))]
}

// Median is Quantile(samples, .5).
func Median[T cmp.Ordered](samples []T) T { return Quantile(samples, .5) }

// Ratio returns a divided by b, where b counts as a nanosecond if it is shorter.
func Ratio(a, b time.Duration) float64 { return float64(a) / float64(max(b, 1)) }

// ProcessorTime returns the processor time that a server has used since it started.
func ProcessorTime(ctx context.Context, rdb *redis.Client) (used time.Duration, err error) {
	info, err := rdb.Info(ctx, "cpu").Result()
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(info) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_user" || name == "used_cpu_sys" {
			seconds, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return 0, err
			}
			used += time.Duration(seconds * float64(time.Second))
		}
	}
	return used, nil
}
