package lockstate

// Reason says why a lease was lost. 0 means no reason.
type Reason uint8

const (
	notKept       Reason = iota + 1
	notConfirmed         // in time
	collected            // see Lock.Collected
	notOurs              // according to a renewal
	notDowngraded        // according to a downgrade
	lostAtRelease        // according to the release
	LostUnproved
	givenToWriter
	Evicted
	Overlong
)

func (r Reason) String() string {
	return [...]string{
		0:             "",
		notKept:       "Redis had not kept it for us",
		notConfirmed:  "Redis did not confirm it in time",
		collected:     "its Lease was garbage-collected without Unlock, so it was no longer renewed",
		notOurs:       "Redis reports that this process no longer owns it",
		notDowngraded: "this process no longer owned the lock when it was to be downgraded",
		lostAtRelease: "this process no longer owned the lock when it released it",
		LostUnproved:  "its release had no answer, and the lock may have been another's meanwhile",
		givenToWriter: "Redis gave the lock to a writer",
		Evicted:       "an operator evicted its owner",
		Overlong:      "it was held for its maximum",
	}[r]
}
