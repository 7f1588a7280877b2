package quorum

import (
	"errors"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Each text must give a true reason. That enough servers answered is not a reason to fail.
func TestWhatIsSaidWhereNothingCouldBeDecided(t *testing.T) {
	refused := &protocol.Failure{Err: errors.New("LOADING Redis is loading the dataset in memory"), Kind: protocol.RefusedNow}
	done := Result{Answer: protocol.Answer{Outcome: protocol.Done}}
	not := Result{Answer: protocol.Answer{Outcome: protocol.NotOurs}}
	none := Result{Fail: refused, Canceled: protocol.Canceled{Fail: refused}}
	everywhere := []bool{true, true, true, true, true}
	const acquire = protocol.None // stands for the acquire of a request that owns nothing yet
	for what, c := range map[string]struct {
		owned []bool
		verb  protocol.Verb
		of    []Result // of the first servers; the others are silent until the command expires
		want  string
	}{
		"an acquire, all silent":         {nil, acquire, nil, "0 of 5 servers answered, but 3 are needed; no answer in time"},
		"an acquire, two of five answer": {nil, acquire, []Result{granted(1), granted(1), none}, "2 of 5 servers answered, but 3 are needed; server 3: LOADING Redis is loading the dataset in memory; servers 4 and 5: no answer in time"},
		"an acquire, two in quarantine": {nil, acquire, []Result{granted(1), young(protocol.Granted, 1, 30*time.Second), young(protocol.Granted, 1, 20*time.Second)},
			"too few of 5 servers may vote: those without data, as after a restart, are in quarantine for another 30.3s, and 2 failed; servers 4 and 5: no answer in time"},
		"an acquire, four in quarantine, all answer": {nil, acquire, []Result{granted(1), young(protocol.Granted, 1, 30*time.Second), young(protocol.Granted, 1, 30*time.Second),
			young(protocol.Granted, 1, 30*time.Second), young(protocol.Granted, 1, 30*time.Second)},
			"too few of 5 servers may vote: those without data, as after a restart, are in quarantine for another 30.3s"},
		"a release, one had lost it":                      {everywhere, protocol.Release, []Result{done, done, not}, "fewer than 3 of 5 servers confirmed the command, and 2 failed; servers 4 and 5: no answer in time"},
		"a release, two had lost it":                      {everywhere, protocol.Release, []Result{done, not, not, none}, "fewer than 3 of 5 servers confirmed the command, and 2 failed; server 4: LOADING Redis is loading the dataset in memory; server 5: no answer in time"},
		"a release, all silent":                           {everywhere, protocol.Release, nil, "0 of 5 servers answered, but 3 are needed; no answer in time"},
		"a release, two were away and have nothing of it": {[]bool{true, true, true}, protocol.Release, []Result{done, done}, "fewer than 3 of 5 servers confirmed the command, and 1 failed; server 3: no answer in time"},
		"a downgrade, one had lost it": {everywhere, protocol.Downgrade, []Result{granted(2), granted(2), not},
			"fewer than 3 of 5 servers confirmed the command, and 2 failed; servers 4 and 5: no answer in time"},
	} {
		t.Run(what, func(t *testing.T) {
			s := newStand(t, 5, time.Minute)
			s.lock.cfg.Away = func(i int) bool { return c.owned != nil && i >= len(c.owned) }
			var op *Op
			switch c.verb {
			case acquire:
				op = s.acquire()
			default:
				s.own(c.owned...)
				s.fx = Effects{}
				op = s.lock.Do(&protocol.Command{Verb: c.verb, ID: s.id, Next: s.lower(), At: s.now}, s.now, &s.fx)
			}
			sends := s.fx.Sends
			for i := range c.of {
				s.answer(sends[i], c.of[i])
			}
			if !op.Decided() {
				s.expire(op)
			}
			if op.Err == nil || op.Err.Error() != c.want {
				t.Errorf("it says %q, want %q", op.Err, c.want)
			}
			if !errors.Is(op.Err, ErrNoQuorum) {
				t.Error("it is not ErrNoQuorum")
			}
		})
	}
	for want, e := range map[string]*noQuorum{
		"1 of 3 servers answered, but 2 are needed; no answer in time":                                              {answered: 1, n: 3, need: 2, why: []serverError{{noServer, errAway}}},
		"1 of 5 servers answered, but 3 are needed; servers 1, 3 and 5: no answer in time; server 2: loading":       {answered: 1, n: 5, need: 3, why: []serverError{{0, errAway}, {1, errors.New("leased: loading")}, {2, errAway}, {4, errAway}}},
		"0 of 3 servers answered, but 2 are needed; an earlier command has no answer yet":                           {n: 3, need: 2, why: []serverError{{0, errBusy}, {1, errBusy}, {2, errBusy}}},
		"fewer than 2 of 3 servers confirmed the command":                                                           {answered: 3, n: 3, need: 2},
		"too few of 3 servers may vote: those without data, as after a restart, are in quarantine for another 1.5s": {answered: 3, n: 3, need: 2, young: 1500*time.Millisecond + 1},
	} {
		if got := e.Error(); got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
	}
}
