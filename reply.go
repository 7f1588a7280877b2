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
	case o == 1 && (len(reply) == 5 || len(reply) == 6):
		return answer{
			outcome: granted,
			token:   uint64(number(1)),
			clock:   uint64(number(2)),
			more:    number(3) == 1,
			handed:  int(number(4)),
			gone:    len(reply) == 6,
		}, nil
	case (o == 2 || o == 3) && (len(reply) == 9 || len(reply) == 10):
		blocker, _ := reply[5].(string)
		return answer{
			outcome: enqueued + outcome(o-2),
			token:   uint64(number(1)),
			clock:   uint64(number(2)),
			place:   int(number(3)),
			left:    time.Duration(number(4)) * time.Millisecond,
			blocker: blocker,
			mute:    number(6) == 1,
			echo:    int(number(7)),
			handed:  int(number(8)),
			gone:    len(reply) == 10,
		}, nil
	case o == 4:
		return answer{outcome: notOurs}, nil
	case o == 5:
		return answer{outcome: done, handed: int(number(1))}, nil
	}
	return answer{}, malformed(reply)
}

// validToken: tokens are below 2^53; 0 is the floor of a lock that never gave one.
func validToken(n int64) bool { return n >= 0 && n < 1<<53 }
