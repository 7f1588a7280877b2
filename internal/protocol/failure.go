package protocol

import "errors"

// The root package re-exports and documents these errors.
var (
	ErrClosed      = errors.New("leased: client is closed")
	ErrInvalidName = errors.New("leased: invalid lock name")
	ErrNoReplicas  = errors.New("leased: too few replicas have the grant")
)

// ErrPanicked is the error of a command that was cut short by user code that it called.
var ErrPanicked = errors.New("leased: a hook of the Redis client, or the back-off policy, panicked or ended its goroutine")

// Failure is the error of a command, and what it means for the lock. An error is classified
// once, before the state machine sees it, because its methods can be user code (from a hook
// of the Redis client), which must not run while a mutex is held.
type Failure struct {
	Err  error
	Kind FailureKind

	// Again says that the command met a connection that had been closed, or that led to a server which
	// is a replica by now, and that the server has answered since, or that a node of a Cluster has named the
	// one to ask. So the failure says nothing about the server, and the command can be repeated at once.
	Again bool

	// LacksReplicas says that Redis has granted the lock, but that too few replicas have that, so the grant
	// does not count. It has to be canceled, and because a copy of the cancel may arrive late, its id must
	// not be used again.
	LacksReplicas bool

	// Partly says that Redis refused a command inside the script, which may have carried out others before.
	// What they left of the request has to be canceled.
	Partly bool

	// Moved says that a node of a Cluster has answered that it does not serve the slot.
	Moved bool
}

// FailureKind says what a command's error means. NeedsOperator and the kinds after it do not
// pass with time.
type FailureKind uint8

// The kinds of failure.
const (
	NoAnswer      FailureKind = iota // the command may have run, or may still run
	NeverSent                        // there was no connection to send it on
	RefusedNow                       // Redis refused it and did nothing, and may accept it later
	NeedsOperator                    // Redis refuses it, and does nothing (but see Partly), until an operator intervenes
	OtherType                        // like NeedsOperator, because a key of the lock holds another type of value
	ClientClosed                     // the Redis client is closed, so no command can be sent anymore
	FailureKinds                     // how many there are
)

// String returns the name of the kind in metrics.
func (k FailureKind) String() string {
	return [...]string{"no_answer", "not_sent", "refused", "needs_operator", "wrong_type", "closed"}[k]
}

// MayRun reports whether the command may have run or may run later.
func (f *Failure) MayRun() bool { return f != nil && f.Kind == NoAnswer }

// Lasts reports whether repeating the command soon is pointless.
func (f *Failure) Lasts() bool { return f.Kind >= NeedsOperator }

// Hopeless reports whether no command can ever succeed again, so that even Lock gives up.
func (f *Failure) Hopeless() bool { return f.Kind == ClientClosed }
