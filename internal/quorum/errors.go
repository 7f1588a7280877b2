package quorum

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// ErrNoQuorum is the error of a command that too few servers answered.
var ErrNoQuorum = errors.New("leased: too few servers answered")

var (
	errAway = errors.New("no answer in time")
	errBusy = errors.New("an earlier command has no answer yet")
)

// noQuorum says why a command could not be decided: too few servers answered or, if enough did, too
// few of them agreed. It also says which of the others failed, and why.
type noQuorum struct {
	answered, n, need int           // answered: the servers without an error
	young             time.Duration // > 0: enough answered, but the grants of servers in quarantine do not count for this long
	why               []serverError
	kind              protocol.FailureKind
}

// serverError is why a server did not do what it was asked for.
type serverError struct {
	server int // counted from 0, or noServer if the error is about none in particular
	err    error
}

const noServer = -1

func (e *noQuorum) Error() string {
	var b strings.Builder
	switch {
	case e.young > 0:
		fmt.Fprintf(&b, "too few of %d servers may vote: those without data, as after a restart, are in quarantine for another %v",
			e.n, e.young.Round(time.Millisecond))
	case e.answered < e.need:
		fmt.Fprintf(&b, "%d of %d servers answered, but %d are needed", e.answered, e.n, e.need)
	default:
		// Some said no, and some were not asked, because they did not have the request. All that is
		// known is that too few said yes, and that those that failed might have said yes.
		fmt.Fprintf(&b, "fewer than %d of %d servers confirmed the command", e.need, e.n)
	}
	if failed := e.n - e.answered; failed > 0 && e.answered >= e.need {
		fmt.Fprintf(&b, ", and %d failed", failed)
	}
	var texts []string
	servers := map[string][]string{} // by text, counted from 1 as in the log
	for _, r := range e.why {
		text := strings.TrimPrefix(r.err.Error(), "leased: ")
		if _, ok := servers[text]; !ok {
			texts = append(texts, text)
			servers[text] = nil
		}
		if r.server != noServer {
			servers[text] = append(servers[text], strconv.Itoa(r.server+1))
		}
	}
	for _, text := range texts {
		b.WriteString("; ")
		switch of, last := servers[text], len(servers[text])-1; {
		case len(of) == 0 || len(of) == e.n:
		case len(of) == 1:
			b.WriteString("server " + of[0] + ": ")
		default:
			b.WriteString("servers " + strings.Join(of[:last], ", ") + " and " + of[last] + ": ")
		}
		b.WriteString(text)
	}
	return b.String()
}

// Unwrap leaves out that the Redis client of a server is closed, unless that decided: others may answer
// again.
func (e *noQuorum) Unwrap() []error {
	is := []error{ErrNoQuorum}
	for _, r := range e.why {
		if e.kind == protocol.ClientClosed || !errors.Is(r.err, redisserver.ErrRedisClosed) {
			is = append(is, r.err)
		}
	}
	return is
}

// FailureKind says what the failure means for the lock; see redisserver.Classify.
func (e *noQuorum) FailureKind() protocol.FailureKind { return e.kind }
