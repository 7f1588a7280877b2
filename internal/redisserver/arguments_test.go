package redisserver

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// There are more locks and more TTLs than slots to cache them in.
func TestWhatIsCachedForOneLockOrTTLIsNotUsedForAnother(t *testing.T) {
	a := newArguments("inboxes:")
	for i := range 10 * len(a.locks) {
		k, err := protocol.NewKeys("", fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := a.keys(&k), k.All(); !slices.Equal(got, want[:]) {
			t.Errorf("the keys of lock %d are %v", i, got)
		}
		ttl := time.Duration(i) * time.Millisecond
		if got := a.milliseconds(ttl); got != Milliseconds(ttl) {
			t.Errorf("%v is sent as %v", ttl, got)
		}
		if got := decimal(uint64(i)); got != fmt.Sprint(i) {
			t.Errorf("%d is sent as %v", i, got)
		}
	}
}
