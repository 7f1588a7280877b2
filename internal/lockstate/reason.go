package lockstate

// Reason says why a lease was lost. 0 means no reason.
type Reason uint8

const (
	notKept       Reason = iota + 1
	NotConfirmed         // in time
	Slept                // the machine, as its clocks say that have moved apart
	collected            // see Lock.Collected
	NotOurs              // according to a renewal
	notDowngraded        // according to a downgrade
	LostAtRelease        // according to the release
	LostUnproved
	givenToWriter
	Evicted
	Overlong
)

func (r Reason) String() string {
	return [...]string{
		0:             "",
		notKept:       "Redis no longer had it when asked",
		NotConfirmed:  "it could not be renewed in time",
		Slept:         "this machine slept, or its clock was set ahead",
		collected:     "its Lease was garbage-collected without Unlock, so it was no longer renewed",
		NotOurs:       "Redis reports that this process no longer owns it",
		notDowngraded: "this process no longer owned the lock when it was to be downgraded",
		LostAtRelease: "this process no longer owned the lock when it released it",
		LostUnproved:  "a command about it got no reply, or an error instead of one, and another owner may have had the lock in between",
		givenToWriter: "Redis gave the lock to a writer",
		Evicted:       "an operator evicted its owner",
		Overlong:      "its maximum hold ended",
	}[r]
}
