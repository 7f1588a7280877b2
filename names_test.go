package leased

import (
	"math/rand"
	"strings"
	"testing"
)

// No key of a lock is a key of another: else one would wait for the other, or be
// taken away with it. Names are made of the pieces that keys are made of.
func TestNoKeyOfALockIsAKeyOfAnother(t *testing.T) {
	pieces := []string{"N", "M", ":", ":", "{", "}", "{N}", "{M}", ":{N}", "N:{N}", "queue", "readers", "waiters", "meta", ":queue", "::queue", ":meta", "::meta"}
	rng := rand.New(rand.NewSource(1))
	random := func(most int) string {
		var b strings.Builder
		for range rng.Intn(most + 1) {
			b.WriteString(pieces[rng.Intn(len(pieces))])
		}
		return b.String()
	}
	tags := [2]int{}
	owner := map[string]string{} // key → the lock's own key
	for range 200_000 {
		k, err := newKeys(random(2), random(4))
		if err != nil {
			continue
		}
		if owner[k.lock] == k.lock {
			continue // seen
		}
		tags[map[bool]int{true: 1}[k.tagged]]++
		for _, key := range k.all() {
			if other, taken := owner[key.(string)]; taken && other != k.lock {
				t.Fatalf("%q is a key of lock %q and of lock %q", key, k.lock, other)
			}
			owner[key.(string)] = k.lock
		}
	}
	if tags[0] < 1_000 || tags[1] < 1_000 {
		t.Errorf("only %d names without a hash tag and %d with one were tried", tags[0], tags[1])
	}
}
