package simulation

import (
	"fmt"
	"sort"
	"strings"
	"testing"
)

const everyKind = "every kind"

// simEvents lists, by kind and number of schedules, the events that so many schedules of a
// kind must reach, each at least once: kinds of trouble, outcomes, and what happens in each
// state of the grant. In practice, each is reached about thirty times in that many schedules.
// A simulation that never reaches a situation proves nothing about it. In 200,000 schedules,
// each event must be reached a thousand times.
//
// With -v all counts are printed.
var simEvents = map[string]map[int][]string{
	everyKind: {
		150: {
			"Unlock: lost",
			"Unlock: nil",
			"a command is doubled",
			"a command is late",
			"a command is lost",
			"a foreigner takes it",
			"a late copy arrives",
			"a lease is lost",
			"a lock made anew",
			"a process stops",
			"a minimum hold outlasts its Unlock",
			"a pace is judged",
			"a provisional grant",
			"an answer is lost",
			"an end is awaited",
			"world: far apart",
			"world: helper keys",
			"asking × abandon",
			"asking × acquire failed: no answer",
			"asking × acquire granted",
			"asking × acquire queued",
			"asking × acquire refused",
			"asking × enter",
			"asking × tick",
			"asking × wanted",
			"entered, direct",
			"entered, free",
			"entered, local",
			"entered, recheck",
			"held × acquire granted",
			"held × enter",
			"held × leave",
			"held × question granted",
			"held × renewed",
			"held × tick",
			"held × wanted",
			"none × enter",
			"none × leave",
			"none × renewal not ours",
			"queued × abandon",
			"queued × acquire granted",
			"queued × acquire queued",
			"queued × acquire queued briefly",
			"queued × enter",
			"queued × granted",
			"queued × tick",
			"queued × wanted",
			"releasing × enter",
			"releasing × release done",
			"releasing × release not ours",
			"releasing × yield queued",
			"reentered",
			"the grant is kept",
			"turned away",
			"world: anew",
			"world: back-off",
			"world: busy",
			"world: excuses",
			"world: heeds",
			"world: intruders",
			"world: long holds",
			"world: min holds",
			"world: older state",
			"world: outages",
			"world: rates",
			"world: refusals",
			"world: silently",
			"world: uncounted",
			"world: uncounting",
			"world: unlike",
		},
		600: {
			"a check: no answer",
			"a check: ours",
			"a check: over",
			"held × check",
			"world: checks",
			"a message is doubled",
			"a message is lost",
			"a pipeline is refused silently",
			"a process is killed",
			"a waiter is killed",
			"accident: an operator evicts the owner",
			"accident: somebody deletes the key",
			"accident: the server is flushed",
			"accident: the server's clock jumps ahead",
			"an excuse ends",
			"an inbox is half open",
			"an inbox is lost",
			"an outage loses a command",
			"an owner demands an echo",
			"asking × acquire failed: an operator's",
			"asking × acquire failed: another type",
			"asking × acquire failed: never sent",
			"asking × acquire failed: refused",
			"asking × granted",
			"asking × renewal not ours",
			"asking × subscribed",
			"error: NOPERM",
			"error: redis:",
			"held × abandon",
			"held × granted",
			"held × renewal not ours",
			"none × abandon",
			"none × renewal unanswered",
			"none × renewed",
			"none × wanted",
			"queued × acquire failed: no answer",
			"queued × renewal not ours",
			"releasing × abandon",
			"releasing × renewed",
			"releasing × tick",
			"the scripts are flushed",
			"the server's clock jumps back",
			"WAIT counts a replica too late",
			"WAIT counts no replica",
			"a caller gives back",
			"a client is closed",
			"a closed client has stopped",
			"a failover",
			"asking × close",
			"held × give back",
			"none × close",
			"world: closes",
			"world: dead queue",
			"world: gives back",
			"world: other type",
			"world: replicas",
			"world: suspensions",
		},
		5000: {
			"a loss is judged at the release",
			"a loss is judged by its renewals",
			"WAIT is refused",
			"a long hold",
			"a machine sleeps",
			"a message for no lock",
			"accident: somebody puts a hash in its place",
			"accident: the server restarts from an older state",
			"an inbox counts no receiver",
			"an inbox is elsewhere",
			"an inbox is rebuilt",
			"an outage",
			"an outage is probed",
			"asking × canceled",
			"asking × messageless",
			"asking × reachable",
			"asking × renewal unanswered",
			"asking × renewed",
			"asking × revoked",
			"entered, idle",
			"error: READONLY",
			"held × acquire failed: no answer",
			"held × acquire queued",
			"held × close",
			"held × revoked",
			"held × reconnected",
			"held × subscribed",
			"none × canceled",
			"none × granted",
			"none × messageless",
			"none × subscribed",
			"queued × acquire failed: an operator's",
			"queued × acquire failed: never sent",
			"queued × acquire failed: refused",
			"queued × canceled",
			"queued × close",
			"queued × renewal unanswered",
			"queued × renewed",
			"releasing × close",
			"releasing × release failed: no answer",
			"releasing × release failed: refused",
			"releasing × renewal unanswered",
			"releasing × subscribed",
			"releasing × yield failed: no answer",
			"releasing × yield not ours",
		},
	},
	"readers and writers": {
		150: {
			"releasing × renewal not ours",
			"releasing × wanted",
			"releasing × yield granted",
			"reserving × acquire queued",
			"reserving × enter",
			"reserving × leave",
			"reserving × renewed",
			"reserving × tick",
			"reserving × wanted",
		},
		600: {
			"an inbox comes back",
			"downgrading × downgrade granted",
			"downgrading × enter",
			"downgrading × tick",
			"error: OOM",
			"error: dial",
			"held × downgrade",
			"none × acquire queued",
			"none × tick",
			"queued × ends",
			"reserving × abandon",
			"reserving × ends",
		},
		5000: {
			"a caller gives back whose hold has ended",
			"asking × ends",
			"asking × leave",
			"downgrading × abandon",
			"downgrading × downgrade",
			"downgrading × downgrade failed: no answer",
			"downgrading × leave",
			"downgrading × renewal not ours",
			"downgrading × renewal unanswered",
			"downgrading × renewed",
			"downgrading × subscribed",
			"downgrading × wanted",
			"error: LOADING",
			"held × canceled",
			"held × ends",
			"held × question not ours",
			"held × renewal unanswered",
			"held × unwanted",
			"none × acquire failed: no answer",
			"none × acquire granted",
			"none × downgrade",
			"queued × leave",
			"queued × subscribed",
			"releasing × ends",
			"releasing × granted",
			"releasing × yield failed: refused",
			"reserving × acquire failed: no answer",
			"reserving × acquire granted",
			"reserving × granted",
			"reserving × renewal not ours",
			"reserving × renewal unanswered",
			"reserving × subscribed",
		},
	},
	"writers": {
		150: {
			"an inbox comes back",
			"none × tick",
		},
		600: {
			"error: LOADING",
			"held × renewal unanswered",
			"queued × subscribed",
			"releasing × renewal not ours",
			"releasing × wanted",
			"releasing × yield granted",
		},
		5000: {
			"error: OOM",
			"error: dial",
			"releasing × release failed: never sent",
		},
	},
}

// reached checks the counts of n schedules and prints them.
func reached(t *testing.T, name string, counts map[string]int, n int) {
	t.Helper()
	var all []string
	for what := range counts {
		all = append(all, what)
	}
	sort.Strings(all)
	var b strings.Builder
	for _, what := range all {
		fmt.Fprintf(&b, "%10d  %s\n", counts[what], what)
	}
	t.Logf("%d schedules of %s:\n%s", n, name, b.String())
	if *simWithout != "" || *simWith != "" {
		return
	}
	least := 1
	if n >= 200_000 {
		least = 1000
	}
	for _, kind := range []string{everyKind, name} {
		for after, events := range simEvents[kind] {
			for _, what := range events {
				if n >= after && counts[what] < least {
					t.Errorf("%q was reached %d times in %d schedules", what, counts[what], n)
				}
			}
		}
	}
}
