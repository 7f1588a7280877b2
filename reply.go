package leased

import (
	"fmt"
	"time"
)

func malformed(reply any) error {
	return fmt.Errorf("leased: malformed answer %.200q", fmt.Sprint(reply))
}

// parseAnswer reads what common.lua calls granted_reply, waiting_reply and the
// two-element replies.
func parseAnswer(reply []any) (answer, error) {
	number := func(i int) int64 {
		n, ok := reply[i].(int64)
		if !ok {
			return -1
		}
		return n
	}
	if len(reply) < 2 {
		return answer{}, malformed(reply)
	}
	switch o := number(0); {
	case o <= 3 && !validToken(number(1)):
		return answer{}, malformed(reply)
	case o == 1 && (len(reply) == 7 || len(reply) == 8):
		return answer{
			outcome: granted,
			token:   uint64(number(1)),
			clock:   uint64(number(2)),
			more:    number(3) == 1,
			handed:  int(number(4)),
			gone:    len(reply) == 8,

			unfinished: number(5) == 1,
			extended:   number(6) == 1,
		}, nil
	case (o == 2 || o == 3) && (len(reply) == 11 || len(reply) == 12):
		blocker, _ := reply[5].(string)
		return answer{
			outcome: enqueued + outcome(o-2),
			token:   uint64(number(1)),
			clock:   uint64(number(2)),
			place:   int(number(3)),
			left:    remaining(number(4)),
			blocker: blocker,
			mute:    number(6) == 1,
			echo:    int(number(7)),
			handed:  int(number(8)),
			gone:    len(reply) == 12,
			told:    uint64(max(0, number(10))),

			unfinished: number(9) == 1,
		}, nil
	case o == 4:
		return answer{outcome: notOurs}, nil
	case o == 5:
		return answer{outcome: done, handed: int(number(1)), unfinished: len(reply) > 2 && number(2) == 1}, nil
	}
	return answer{}, malformed(reply)
}

// remaining returns so many ms, and 100 years at most: others may set any expiry.
func remaining(ms int64) time.Duration {
	const century = 100 * 365 * 24 * 3600 * 1000
	return time.Duration(max(-century, min(ms, century))) * time.Millisecond
}

// parseEviction reads the answer of evict.lua.
func parseEviction(reply any) (token int64, told int, unfinished bool, evicted []string, err error) {
	all, _ := reply.([]any)
	if len(all) != 4 {
		return 0, 0, false, nil, malformed(reply)
	}
	token, _ = all[0].(int64)
	n, _ := all[1].(int64)
	more, _ := all[2].(int64)
	owners, _ := all[3].([]any)
	for _, owner := range owners {
		id, _ := owner.(string)
		evicted = append(evicted, id)
	}
	if n < 0 || n > int64(len(evicted)) {
		return 0, 0, false, nil, malformed(reply)
	}
	return token, int(n), more == 1, evicted, nil
}

// validToken: tokens are below 2^53; 0 is the floor of a lock that never gave one.
func validToken(n int64) bool { return n >= 0 && n < 1<<53 }
