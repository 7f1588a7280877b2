package main

import (
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

func TestAPatternIsThatOfRedis(t *testing.T) {
	rdb := redistest.Server(t).Client()
	words := []string{"", "a", "b", "ab", "abc", "a*c", "a]c", "a-c", "axxc", "héé"}
	for _, pattern := range []string{"", "*", "a", "a*", "*c", "a*c", "a?c", "[ab]", "[^a]", "[a-b]*", "a[]x]c", `a\*c`, "**", "a**c", "[", "[a", `\`, "a[x-]c", "[b-a]", "h??", "h????"} {
		for _, word := range words {
			if word == "" {
				continue // no key is empty
			}
			ctx := t.Context()
			rdb.FlushAll(ctx)
			rdb.Set(ctx, word, 1, 0)
			found, err := rdb.Keys(ctx, pattern).Result()
			if err != nil {
				t.Fatal(err)
			}
			if want := len(found) == 1; globMatch(pattern, word) != want {
				t.Errorf("globMatch(%q, %q) is %v, and Redis says %v", pattern, word, !want, want)
			}
		}
	}
}
