package protocol

import (
	"encoding/hex"
	"errors"
	"math/rand"
	"net/url"
	"strings"
	"testing"
)

// If two locks shared a key, one would wait for the other or be deleted with it. The names are
// made of the pieces that keys are made of.
func TestNoKeyOfALockIsAKeyOfAnother(t *testing.T) {
	pieces := []string{"N", "M", "leased:quorum:mark", "leased:quorum:mark", ":", ":", "{", "}", "{N}", "{M}", ":{N}", "N:{N}", "queue", "readers", "waiters", "meta", ":queue", "::queue", ":meta", "::meta"}
	rng := rand.New(rand.NewSource(1))
	random := func(most int) string {
		var b strings.Builder
		for range rng.Intn(most + 1) {
			b.WriteString(pieces[rng.Intn(len(pieces))])
		}
		return b.String()
	}
	tagged, untagged := 0, 0
	owner := map[string]string{} // key → the lock's own key
	marks := map[string]bool{}   // those of clients with other prefixes
	for range 200_000 {
		k, err := NewKeys(random(2), random(4))
		if err != nil {
			continue
		}
		if owner[k.Lock] == k.Lock {
			continue // seen
		}
		if k.tagged {
			tagged++
		} else {
			untagged++
		}
		marks[MarkKey(random(2))] = true
		for _, key := range k.All() {
			if other, taken := owner[key.(string)]; taken && other != k.Lock {
				t.Fatalf("%q is a key of lock %q and of lock %q", key, k.Lock, other)
			}
			owner[key.(string)] = k.Lock
		}
	}
	for key := range owner {
		if marks[key] {
			t.Errorf("%q is a key of lock %q, and where a server keeps its age", key, owner[key])
		}
	}
	if untagged < 1_000 || tagged < 1_000 {
		t.Errorf("only %d names without a hash tag and %d with one were tried", untagged, tagged)
	}
}

// docs/migration.md says so of ids that come from outside, and why url.PathEscape is not enough.
func TestAnIDInHexIsAlwaysAName(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	ids := []string{"", "}{", "{}", "{", "}", "\x00", "\xff", "leased:quorum:mark", "queue", "readers", "waiters", "meta"}
	for range 10_000 {
		id := make([]byte, rng.Intn(201))
		rng.Read(id)
		ids = append(ids, string(id))
	}
	for _, id := range ids {
		for _, before := range []string{"account:", "{account}:"} {
			if _, err := NewKeys("", before+hex.EncodeToString([]byte(id))); err != nil {
				t.Errorf("%q: %v", id, err)
			}
		}
	}
	if _, err := NewKeys("", "account:"+url.PathEscape("leased:quorum:mark")); !errors.Is(err, ErrInvalidName) {
		t.Errorf("url.PathEscape: %v", err)
	}
}
