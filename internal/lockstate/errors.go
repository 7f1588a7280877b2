package lockstate

import (
	"errors"
	"strings"
)

// The root package exports and documents these errors.
var (
	ErrNotAcquired       = errors.New("leased: lock not acquired")
	ErrLocked      error = &kind{"leased: another caller holds the lock or waits for it", ErrNotAcquired}
	ErrLeaseLost         = errors.New("leased: lease lost")
	ErrMaxHold     error = &kind{"leased: maximum hold exceeded", ErrLeaseLost}
	ErrNotReleased       = errors.New("leased: release not confirmed")
)

// Why a Try caller was rejected without asking Redis. All match ErrLocked.
var (
	errHeldHere   error = &kind{"leased: another caller of this process holds the lock", ErrLocked}
	errKeptHere   error = &kind{"leased: a caller of this process whose lease has ended has not unlocked", ErrLocked}
	errWantedHere error = &kind{"leased: another caller of this process waits for the lock", ErrLocked}
)

// kind is a sentinel that wraps another one.
type kind struct {
	text string
	is   error
}

func (k *kind) Error() string { return k.text }
func (k *kind) Unwrap() error { return k.is }

// ReleaseUnconfirmed is the outcome of a release that nothing will confirm anymore. The lock's name is
// not known here, so the root package puts an error that has it in its place.
type ReleaseUnconfirmed struct{ Why error }

func (e *ReleaseUnconfirmed) Error() string {
	return ErrNotReleased.Error() + ": " + strings.TrimPrefix(e.Why.Error(), "leased: ")
}
func (e *ReleaseUnconfirmed) Unwrap() []error { return []error{ErrNotReleased, e.Why} }

// LostToo is what Unlock returns for a lease that had already ended, if Redis did not confirm
// the release either.
type LostToo struct {
	Release error // the outcome of the release
}

func (e *LostToo) Error() string   { return ErrLeaseLost.Error() + "; " + e.Release.Error() }
func (e *LostToo) Unwrap() []error { return []error{ErrLeaseLost, e.Release} }
