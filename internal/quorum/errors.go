package quorum

import (
	"errors"
	"fmt"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// ErrNoQuorum is why a command failed that too few servers answered.
var ErrNoQuorum = errors.New("leased: too few servers answered")

var (
	errAway = errors.New("it does not answer")
	errBusy = errors.New("an earlier command has no answer yet")
)

// noQuorum says how many servers answered, and why the others did not.
type noQuorum struct {
	answered, n, need int
	young             time.Duration // > 0: enough granted, but for those in quarantine
	why               []error
	kind              protocol.FailureKind
}

func (e *noQuorum) Error() string {
	text := fmt.Sprintf("%d of %d servers answered, and %d are needed", e.answered, e.n, e.need)
	if e.young > 0 {
		text = fmt.Sprintf("too few of %d servers may vote: those without data, as after a restart, are in quarantine for another %v",
			e.n, e.young.Round(time.Millisecond))
	}
	seen := map[string]bool{}
	for _, err := range e.why {
		if t := err.Error(); !seen[t] {
			seen[t] = true
			text += "; " + t
		}
	}
	return text
}

func (e *noQuorum) Unwrap() []error { return append([]error{ErrNoQuorum}, e.why...) }

// FailureKind says what the failure means for the lock; see redisserver.Classify.
func (e *noQuorum) FailureKind() protocol.FailureKind { return e.kind }
