package leased_test

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// The behaviour suite on a quorum: LEASED_SERVERS=quorum has every test of it run on five
// embedded servers too. What a test does to the server, by its client, is done to all.
// Tests about the connection to one server are skipped.

// members are the servers of a quorum.
type members struct {
	minis   []*miniredis.Miniredis
	virtual bool
	mu      sync.Mutex                               // guards made
	made    map[*redis.Client][]func(*redis.Options) // clients of the first server, and how they were made
}

const suiteMembers = 5

// notOnQuorum are tests that say nothing about a quorum, by the reason.
var notOnQuorum = map[string][]string{
	"it disturbs one server only, and a quorum goes on": {
		"TestAPolicyThatIsMissingLaterIsLoggedAndReplaced", "TestAnExhaustedPoolIsSaidToBeExhausted",
		"TestAnUnlockBetweenTheTriesOfADowngradeSaysWhetherRedisConfirmed", "TestVirtualASubscriptionThatIsNeverConfirmedIsMadeAnew",
		"TestVirtualAHalfOpenInboxIsNoticedASecondAfterARecheckAndRebuilt", "TestVirtualAnInboxThatRejoinsHasItsWaitersLookAgainAtOnce",
		"TestAfterACheckNobodyIsHandedADeadGrant", "TestACheckThatRedisDoesNotAnswerLeavesTheLeaseAlone",
		"TestWithoutLockNamesLogsOfAnUnconfirmedReleaseDoNotNameTheLock", "TestLogsNameTheLock", "TestTheEndOfAnOutageIsLogged",
		"TestVirtualNoTimerLiesBetweenAContextsEndAndTheReturnOfItsWait", "TestVirtualALeaseEndsWithItsTrustWhileRedisLoads",
		"TestMetricsOfCommandsByWhatFailed", "TestMetricsSayThatAClientPolls", "TestVirtualALockProbesInTheStepsOfOneThatGaveUp",
		"TestVirtualAClusterThatIsHalfBrokenIsNotAskedByAllAllTheTime",
	},
	"another client locks on one server only": {
		"TestForeignAndOwnClientsExcludeEachOther", "TestAForeignOwnerIsPolledFrom50msToAThirdOfTheTTLOr3s", "TestWhoIsKeptOutByItsOwnProcessIsToldSo",
	},
	"it counts commands, connections or keys of one server": {
		"TestCloseStopsEveryGoroutine", "TestAFreeLockBehindDeadWaitersIsGotAtOnce", "TestADowngradeLetsReadersInWhoWaitRightBehindAndNobodyElse",
		"TestVirtualTheFirstLockOfAClientCostsOneMoreCommandIfItIsTakenAndNoneThereafter", "TestLocalHandoffsAreNotBoundedWhenNobodyElseWaits",
		"TestHandlesOfOneLockMayDifferInOptions", "TestVirtualATryTakesNoTimeWhereNobodyIdlesAndLittleWhereTheOwnerIsBusy",
		"TestInspectOfAFreeLockShowsNobodyAndMakesNothing", "TestForceUnlockLetsTheNextWaiterIn", "TestCloseEndsLeasesAndWaitsForTheirUnlock",
		"TestALeaseCanBeDowngradedWhileItsClientCloses", "TestWhoWaitsForTheEndOfAMinimumHoldIsServedInOrderAndDoesNotPoll",
		"TestAMinimumHoldIsSeenByOperatorsAndForeignersAndEndedByForceUnlock", "TestVirtualAHandOffWhereNoCountIsProofCostsOneCommandMore",
	},
}

// skipOnQuorum skips those.
func skipOnQuorum(t *testing.T) {
	t.Helper()
	name, _, _ := strings.Cut(t.Name(), "/")
	for why, names := range notOnQuorum {
		if slices.Contains(names, name) {
			t.Skip(why)
		}
	}
}

// wantsQuorum reports whether LEASED_SERVERS names quorum.
func wantsQuorum() bool {
	return slices.Contains(strings.Split(os.Getenv("LEASED_SERVERS"), ","), "quorum")
}

// quorumPlace returns five embedded servers.
func quorumPlace(t *testing.T, virtual bool) place {
	t.Helper()
	prefix := ""
	if !virtual {
		prefix = redistest.Prefix(t)
	}
	m := &members{virtual: virtual, made: map[*redis.Client][]func(*redis.Options){}}
	for range suiteMembers {
		if virtual {
			m.minis = append(m.minis, redistest.Mini(t))
		} else {
			m.minis = append(m.minis, redistest.MiniTCP(t))
		}
	}
	for _, mini := range m.minis { // old enough to vote
		if err := mini.Set(prefix+"leased:quorum:mark", "1"); err != nil {
			t.Fatal(err)
		}
	}
	s := place{Target: redistest.Target{Name: "quorum", Mini: m.minis[0]}, members: m}
	if !virtual {
		s.Addr, s.Prefix = m.minis[0].Addr(), prefix
	}
	// The test's own client acts on all servers.
	rdb := m.client(t, 0)
	var others []*redis.Client
	for i := 1; i < suiteMembers; i++ {
		others = append(others, m.client(t, i))
	}
	rdb.AddHook(everywhere{others})
	s.rdb = rdb
	redistest.CheckLeaks(t, s.rdb, s.Prefix)
	return s
}

func (m *members) client(t *testing.T, i int, change ...func(*redis.Options)) *redis.Client {
	if m.virtual {
		return redistest.MiniClient(t, m.minis[i], change...)
	}
	return redistest.Target{Addr: m.minis[i].Addr()}.NewClient(t, change...)
}

// connect returns a client of the first server.
func (m *members) connect(t *testing.T, change []func(*redis.Options)) *redis.Client {
	t.Helper()
	o := redistest.Options("127.0.0.1:0")
	addr := o.Addr
	for _, f := range change {
		f(o)
	}
	if o.Addr != addr || o.Limiter != nil || o.Dialer != nil {
		t.Skip("about one server's connection")
	}
	rdb := m.client(t, 0, change...)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.made[rdb] = change
	return rdb
}

// open returns a client of the library on rdb, and on clients like it of the other servers.
func (m *members) open(t *testing.T, rdb redis.UniversalClient, opts []leased.Option) (*leased.Client, error) {
	t.Helper()
	one, _ := rdb.(*redis.Client)
	m.mu.Lock()
	change, ok := m.made[one]
	m.mu.Unlock()
	if !ok {
		t.Skip("about one server's connection")
	}
	all := []redis.UniversalClient{rdb}
	for i := 1; i < suiteMembers; i++ {
		all = append(all, m.client(t, i, change...))
	}
	return leased.NewQuorum(all, append([]leased.Option{leased.WithQuarantine(30 * 24 * time.Hour)}, opts...)...)
}

// everywhere repeats commands on other servers.
type everywhere struct{ others []*redis.Client }

func (h everywhere) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h everywhere) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		for _, other := range h.others {
			if err := other.Do(ctx, cmd.Args()...).Err(); err != nil {
				_ = err // the first server's answer counts
			}
		}
		return next(ctx, cmd)
	}
}

func (h everywhere) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, other := range h.others {
			for _, cmd := range cmds {
				_ = other.Do(ctx, cmd.Args()...)
			}
		}
		return next(ctx, cmds)
	}
}
