// Package target is where package syncsuite puts Go's tests of sync when it runs them.
// They are not in the repository.
package target
