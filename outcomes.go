package leased

import (
	"context"
	"errors"
)

// waitResult is how a wait ended, as spans and metrics name it.
type waitResult uint8

const (
	waitAcquired waitResult = iota
	waitLocked              // a try found it held
	waitTimeout
	waitCanceled
	waitClosed
	waitRefused // by Redis
	waitResults
)

func (r waitResult) String() string {
	return [...]string{"acquired", "locked", "timeout", "canceled", "closed", "refused"}[r]
}

// bad: contention is none of the lock's failures.
func (r waitResult) bad() bool { return r == waitClosed || r == waitRefused }

func waitOutcome(err error) waitResult {
	if err == nil {
		return waitAcquired
	}
	return refusalOutcome(err)
}

func refusalOutcome(err error) waitResult {
	refusal, ok := err.(*notAcquired) //nolint:errorlint // as wait made it; thousands may give up together
	if !ok && !errors.As(err, &refusal) {
		return waitRefused
	}
	// Not what Redis was heard to say last: only why the wait ended.
	switch why := refusal.reason; {
	case errors.Is(why, ErrLocked):
		return waitLocked
	case errors.Is(why, ErrClosed):
		return waitClosed
	case errors.Is(why, context.DeadlineExceeded):
		return waitTimeout
	case errors.Is(why, context.Canceled):
		return waitCanceled
	}
	return waitRefused
}

// holdResult is how a hold ended.
type holdResult uint8

const (
	holdReleased holdResult = iota
	holdLost
	holdForced      // an operator evicted it
	holdUnconfirmed // left, but Redis did not say so in time
	holdAbandoned   // the client was closed over it
	holdResults
)

func (r holdResult) String() string {
	return [...]string{"released", "lost", "forced", "not_released", "abandoned"}[r]
}

// holdOutcome is called under the lock: what err is made of, which can be a user's,
// is not asked.
func holdOutcome(c *caller, err error) holdResult {
	switch {
	case c.ended == byLoss:
		return holdLost
	case err == nil:
		return holdReleased
	}
	return holdUnconfirmed
}

// renewalResult is what came of a renewal.
type renewalResult uint8

const (
	renewalRenewed renewalResult = iota
	renewalLost
	renewalFailed
	renewalResults
)

func (r renewalResult) String() string { return [...]string{"renewed", "lost", "failed"}[r] }
