//go:build unix

package faults

import (
	"testing"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// Replication is asynchronous: what a primary has answered can be lost with it. This test shows
// the limit that docs/deployments.md names, and what is promised all the same: the old holder
// learns of the loss within a renewal period, and the next owner's token is greater, so a
// resource can tell the two apart.
func TestALockThatNoReplicaHadIsLostWithItsPrimaryAndTheNextTokenIsGreater(t *testing.T) {
	t.Parallel()
	n := newFixedName(t)
	strain := redistest.NewStrain(t)
	primary, replica := n.servers.Nodes[0], n.servers.Nodes[1]
	const ttl = 9 * time.Second // so that a third of it, a renewal period, is well before its end
	holder := n.client(leased.WithTTL(ttl), leased.WithLossHandler(func(leased.LossEvent) {}))
	next := n.client()
	mustUnlock(t, mustLock(t, holder.Mutex("x")))
	mustUnlock(t, mustLock(t, next.Mutex("x")))

	replica.Isolate()
	l := mustLock(t, holder.Mutex("x"))
	ended := watch(l)
	primary.Kill()
	replica.Promote()
	n.proxy.Lead(replica.Addr, redistest.KeepNone)
	began := time.Now()
	theirs := mustLock(t, next.Mutex("x"))
	if theirs.Token() <= l.Token() {
		t.Errorf("the next owner's token is %d, after %d", theirs.Token(), l.Token())
	}
	if took := lostAt(t, l, ended).Sub(began); took > ttl/3+slack+strain.Since(began) {
		t.Errorf("the holder learned of its loss after %v", took)
	}
	mustUnlock(t, theirs)
}
