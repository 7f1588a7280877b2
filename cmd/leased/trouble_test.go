//go:build unix

package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// What run and --quorum make of servers that do not answer, at exact times of virtual time.

func TestRunTellsALastingTroubleFromAShortOutage(t *testing.T) {
	for what, outage := range map[string]time.Duration{"short": time.Second, "lasting": time.Minute} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				redistest.LastInBubble(t)
				m := redistest.Mini(t)
				m.Set("job", "somebody else")
				rdb := redistest.MiniClient(t, m)
				var trouble troubleLog
				client, err := leased.New(rdb, leased.WithLogger(slog.New(&trouble)))
				if err != nil {
					t.Fatal(err)
				}
				defer client.Close()
				o := &runOptions{name: "job"}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() { // ended by cancel, waited for below
					defer close(ended)
					if _, err := client.RWMutex(o.name).LockContext(ctx); !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
				}()
				time.Sleep(10 * time.Second)
				if err := trouble.lasting(); err != nil {
					t.Errorf("a lock that is taken is trouble: %v", err)
				}
				m.SetError("LOADING Redis is loading the dataset in memory")
				time.Sleep(outage)
				if got := trouble.lasting(); (got != nil) != (outage > 5*time.Second) {
					t.Errorf("at the end of the outage, the lasting trouble is %v", got)
				}
				m.SetError("")
				time.Sleep(15 * time.Second)
				if got := trouble.lasting(); got != nil {
					t.Errorf("after the outage, the lasting trouble is %v", got)
				}
				cancel()
				<-ended
			})
		})
	}
}

// silent is a server that accepts connections and never answers.
func silent(t *testing.T) redis.UniversalClient {
	o := redistest.Options("127.0.0.1:0")
	o.ContextTimeoutEnabled = true
	o.Dialer = func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { theirs.Close() })
		return ours, nil
	}
	rdb := redis.NewClient(o)
	t.Cleanup(func() { rdb.Close() })
	return rdb
}

func TestAServerOfAQuorumThatHangsIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		answering := func() redis.UniversalClient { return redistest.MiniClient(t, redistest.Mini(t)) }
		options := make([]*redis.UniversalOptions, 3)
		for i := range options {
			options[i] = &redis.UniversalOptions{Addrs: []string{"127.0.0.1:0"}}
		}
		began := time.Now()
		if err := majorityAnswers(t.Context(), []redis.UniversalClient{silent(t), answering(), answering()}, options); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took != othersTime {
			t.Errorf("with one server of three that hangs it took %v", took)
		}
		began = time.Now()
		err := majorityAnswers(t.Context(), []redis.UniversalClient{silent(t), answering(), silent(t)}, options)
		if err == nil || !strings.Contains(err.Error(), "1 of the 3 servers answered") {
			t.Errorf("with two servers of three that hang: %v", err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("with two servers of three that hang it took %v", took)
		}
	})
}

// The answers of a majority need not decide: the others are waited for then, but not for long once they do.
func TestASlowServerOfAQuorumIsAskedWhoHasTheLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redistest.LastInBubble(t)
		server := func(age time.Duration) redis.UniversalClient {
			m := redistest.Mini(t)
			m.Set(protocol.MarkKey(""), strconv.FormatInt(time.Now().Add(-age).UnixMicro(), 10))
			m.Set("job", "of another library")
			return redistest.MiniClient(t, m)
		}
		o := &runOptions{name: "job"}
		for _, c := range []struct {
			servers []redis.UniversalClient
			want    bool
			took    time.Duration
		}{
			{[]redis.UniversalClient{server(time.Hour), server(time.Hour), silent(t)}, true, othersTime},
			{[]redis.UniversalClient{server(time.Hour), server(time.Second), silent(t)}, false, time.Second},
		} {
			began := time.Now()
			got, why := o.contended(t.Context(), &connection{servers: c.servers, quorum: true, quarantine: time.Minute}, leased.ErrNoQuorum)
			if took := time.Since(began); got != c.want || took != c.took {
				t.Errorf("contended: %v, %q after %v; want %v after %v", got, why, took, c.want, c.took)
			}
		}
	})
}

// Trouble that is over by then is no reason, nor is what came before the last trouble.
func TestTheReasonIsTheLastTroubleSinceTheLastRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trouble := troubleLog{warnings: make(chan string, 1), failures: make(chan error, 1)}
		log := slog.New(&trouble)
		began := time.Now()
		log.Warn("leased: Redis refuses lock commands", "lock", "job", "error", errors.New("first"))
		time.Sleep(time.Minute)
		renewed := time.Now()
		if why := trouble.after(renewed); why != nil {
			t.Errorf("trouble of before the renewal is the reason: %v", why)
		}
		time.Sleep(time.Second)
		log.Warn("leased: Redis does not answer; trying again", "lock", "job", "error", errors.New("second"))
		for _, since := range []time.Time{began, renewed} {
			if why := trouble.after(since); why == nil || why.Error() != "second" {
				t.Errorf("the reason is %v", why)
			}
		}
	})
}
