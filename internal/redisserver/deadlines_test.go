package redisserver

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

func TestCommandsThatBeginTogetherShareTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base, stop := context.WithCancel(context.Background())
		d := Deadlines{Base: base}
		began := time.Now()
		first := d.Within(2 * time.Second)
		for range 100 {
			asked := time.Now()
			ctx := d.Within(2 * time.Second)
			end, _ := ctx.Deadline()
			if left := end.Sub(asked); left > 2*time.Second || left < 2*time.Second-2*time.Second/sharedDivisor {
				t.Fatalf("a command that may take 2s has %v", left)
			}
			if shared := time.Since(began) < 2*time.Second/sharedDivisor; shared != (ctx == first) {
				t.Fatalf("after %v shared: %v", time.Since(began), ctx == first)
			}
			time.Sleep(time.Millisecond)
		}
		for _, limit := range []time.Duration{time.Nanosecond, time.Millisecond, time.Second, 9 * time.Second} {
			asked := time.Now()
			if end, _ := d.Within(limit).Deadline(); end.Sub(asked) != limit {
				t.Errorf("a command that may take %v has %v", limit, end.Sub(asked))
			}
		}
		last := d.Within(2 * time.Second)
		stop()
		if last.Err() == nil || d.Within(2*time.Second).Err() == nil {
			t.Error("a command goes on when the client has ended")
		}
	})
}

// Each limit has a slot of its own. If two limits alternated in one slot, every command would create
// a context, and nothing ends such a context before its deadline.
func TestCommandsOfTwoLimitsDoNotTakeEachOthersContext(t *testing.T) {
	base, stop := context.WithCancel(context.Background())
	defer stop()
	d := Deadlines{Base: base}
	var limits []time.Duration
	var ctxs []context.Context
	for i := range d.slots {
		limit := time.Hour + time.Duration(i*len(d.slots)) // the same remainder
		limits, ctxs = append(limits, limit), append(ctxs, d.Within(limit))
	}
	for i, limit := range limits {
		if d.Within(limit) != ctxs[i] {
			t.Errorf("commands of limit %d do not share a context beside others", i)
		}
	}
	if end, _ := d.Within(time.Minute).Deadline(); time.Until(end) > time.Minute {
		t.Errorf("a command of one limit more has %v", time.Until(end))
	}
}

// forgetful is a hook that stands in for a server that answers late, and does not know a script that it
// gets by its hash. It notes how much time each pipeline had.
type forgetful struct {
	takes time.Duration
	had   []time.Duration
}

func (*forgetful) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (*forgetful) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h *forgetful) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		until, _ := ctx.Deadline()
		h.had = append(h.had, time.Until(until))
		time.Sleep(h.takes) // of virtual time
		for _, cmd := range cmds {
			if cmd.Name() == "evalsha" {
				cmd.SetErr(answerError("NOSCRIPT No matching script."))
			} else {
				cmd.(onceCmd).SetVal(int64(1))
			}
		}
		return nil
	}
}

// A server that has lost its scripts and is slow would otherwise be asked in vain, each time.
func TestRenewalsThatAreSentAgainHaveTheTimeOfARoundTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := redis.NewClient(redistest.Options("127.0.0.1:1"))
		defer rdb.Close()
		hook := &forgetful{takes: protocol.CommandTimeout * 9 / 10}
		rdb.AddHook(hook)
		s := New(rdb, "")
		s.Rdb = rdb // New uses a clone, and go-redis clones without hooks
		keys, err := protocol.NewKeys("", "x")
		if err != nil {
			t.Fatal(err)
		}
		batch := []protocol.Renewal{{Keys: &keys, Req: protocol.Request{ID: "a"}}}
		s.Renew(t.Context(), batch)
		if batch[0].Outcome != protocol.Granted {
			t.Errorf("not renewed: %v", batch[0].Err)
		}
		if want := []time.Duration{protocol.CommandTimeout, protocol.CommandTimeout}; !slices.Equal(hook.had, want) {
			t.Errorf("the round trips had %v, want %v", hook.had, want)
		}
		until, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		hook.had, hook.takes = nil, 0
		s.Renew(until, batch)
		if want := []time.Duration{time.Minute, time.Minute}; !slices.Equal(hook.had, want) {
			t.Errorf("with a deadline, the round trips had %v, want %v", hook.had, want)
		}
	})
}

// Where a command does not end at its deadline, no caller may send it: Unlock has a bound.
func TestDeadlinesHoldOnlyWhereConnectionsHaveThem(t *testing.T) {
	for _, c := range []struct {
		name    string
		options redis.Options
		want    bool
	}{
		{"the defaults", redis.Options{}, true},
		{"contexts", redis.Options{ContextTimeoutEnabled: true}, true},
		{"no limit of its own", redis.Options{ReadTimeout: -1, ContextTimeoutEnabled: true}, true},
		{"connections that cannot be read with a deadline", redis.Options{ReadTimeout: -2, ContextTimeoutEnabled: true}, false},
		{"connections that cannot be written with a deadline", redis.Options{WriteTimeout: -2, ContextTimeoutEnabled: true}, false},
		{"the same without contexts", redis.Options{ReadTimeout: -2}, false},
	} {
		rdb := redis.NewClient(&c.options)
		s := New(rdb, "")
		if s.HonorsDeadlines() != c.want {
			t.Errorf("%s: deadlines hold: %v", c.name, !c.want)
		}
		// go-redis would set a deadline where the user has said that there must be none.
		if opts := s.Rdb.(*redis.Client).Options(); rdb.Options().ReadTimeout < 0 && opts.ReadTimeout >= 0 {
			t.Errorf("%s: read with a deadline of %v", c.name, opts.ReadTimeout)
		}
		if err := rdb.Close(); err != nil {
			t.Error(err)
		}
	}
}
