package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// The burst is over when doctor measures the round trip, so only the server remembers it.
func TestDoctorNotesSlowCommandsThatAreOverWhenItLooks(t *testing.T) {
	in := redistest.Server(t)
	rdb := in.Client()
	if got := invoke(t, "doctor", "--redis", in.Addr); got.status != 0 || !strings.Contains(got.out, "\nok    commands     none took more than 50ms on average") {
		t.Errorf("of a server without slow commands: %+v", got)
	}
	// Each keeps the server busy for twice as long as counts as slow. How long that is can only be tried: neither
	// the clock goes on within a script on all servers, nor does each offer another one.
	busy := redis.NewScript(`for i = 1, ARGV[1] do end`)
	run := func(rounds int) (took time.Duration) {
		t.Helper()
		began := time.Now()
		if err := busy.Eval(t.Context(), rdb, nil, rounds).Err(); err != nil && !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
		return time.Since(began)
	}
	rounds := 1 << 16
	for min(run(rounds), run(rounds)) < 2*slowCommand { // the less, because other processes may have been in the way of one
		rounds *= 2
	}
	rdb.ConfigResetStat(t.Context()) // without the scripts of the doctor's locks
	burst := func(n int) {
		t.Helper()
		for range n {
			run(rounds)
		}
	}
	burst(enoughCalls)
	got := invoke(t, "doctor", "--redis", in.Addr)
	text := strings.Join(strings.Fields(got.out), " ")
	if got.status != 0 || !strings.Contains(text, "note commands eval took ") || !strings.Contains(text, "on average of 10 calls") || !strings.Contains(text, "all locks wait") ||
		!strings.Contains(text, "-> SLOWLOG GET shows which client sends it") {
		t.Errorf("%+v", got)
	}

	burst(enoughCalls)
	if rdb.Info(t.Context(), "latencystats").Val() != "" { // Redis 7
		_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for range 1500 {
				p.Eval(t.Context(), "return 1", nil)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		got := invoke(t, "doctor", "--redis", in.Addr)
		if text := strings.Join(strings.Fields(got.out), " "); got.status != 0 || !strings.Contains(text, "note commands eval took ") || !strings.Contains(text, " and more in some of 15") {
			t.Errorf("among many that are fast: %+v", got)
		}
	}
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "few", "on", ">pass", "~*", "&*", "+@all", "-info").Err(); err != nil {
		t.Fatal(err)
	}
	if got := invoke(t, "doctor", "--redis", "redis://few:pass@"+in.Addr); got.status != 0 || strings.Contains(got.out, " commands ") {
		t.Errorf("of a user who may not ask: %+v", got)
	}
}

func TestOnlyCommandsThatHoldUpOthersCountAsSlow(t *testing.T) {
	for _, c := range []struct {
		stats, latencies string
		found            string // in a note, if it is not empty
	}{
		{"cmdstat_eval:calls=10,usec=600000,usec_per_call=60000.00,rejected_calls=0,failed_calls=0\r\n", "", "eval took 60ms on average of 10 calls"},
		{"cmdstat_fcall:calls=12,usec=25200000,usec_per_call=2100000.00", "", "fcall took 2.1s on average of 12 calls"},
		{"cmdstat_eval:calls=9,usec=540000,usec_per_call=60000.00", "", ""},
		{"cmdstat_eval:calls=10,usec=500000,usec_per_call=50000.00", "", ""},
		{"cmdstat_config|get:calls=20,usec=2000000,usec_per_call=100000.00", "", "config get took 100ms"},
		{"cmdstat_blpop:calls=99,usec=99000000,usec_per_call=1000000.00\r\ncmdstat_XREAD:calls=99,usec=99000000,usec_per_call=1000000.00", "", ""},
		{"cmdstat_keys:calls=20,usec=2000000,usec_per_call=100000.00\r\ncmdstat_sort:calls=20,usec=4000000,usec_per_call=200000.00", "", "sort took 200ms on average of 20 calls; keys took"},
		{"cmdstat_evalsha:calls=1000,usec=60000,usec_per_call=60.00", "latency_percentiles_usec_evalsha:p50=40.191,p99=2007039.999,p99.9=2007039.999\r\n", "evalsha took 2.007s and more in some of "},
		{"cmdstat_evalsha:calls=999,usec=60000,usec_per_call=60.00", "latency_percentiles_usec_evalsha:p50=40.191,p99=2007039.999,p99.9=2007039.999\r\n", ""}, // a few calls only
		{"cmdstat_bzpopmin:calls=1000,usec=60000,usec_per_call=60.00", "latency_percentiles_usec_bzpopmin:p50=2007039.999", ""},
		{"# Commandstats\r\n", "# Latencystats\r\n", ""},
	} {
		f := slowFinding(usagesOf(c.stats, c.latencies))
		if c.found == "" && f.verdict != verdictOK || c.found != "" && (f.verdict != verdictNote || !strings.Contains(f.found, c.found) || f.means == "" || f.change == "") {
			t.Errorf("%q, %q: %+v", c.stats, c.latencies, f)
		}
	}
}

// A longer TTL is no cure for a server that is slow.
func TestDoctorsAdviceForALongRoundTripNamesItsCauseFirst(t *testing.T) {
	f := tripsFinding([]time.Duration{time.Millisecond, 200 * time.Millisecond})
	cause, ttl := strings.Index(f.change, "SLOWLOG GET"), strings.Index(f.change, "a TTL of at least 6.0s")
	if f.verdict != verdictNote || cause < 0 || ttl < cause {
		t.Errorf("%+v", f)
	}
	if f := tripsFinding([]time.Duration{time.Millisecond, 100 * time.Millisecond}); f.verdict != verdictOK {
		t.Errorf("%+v", f)
	}
}
