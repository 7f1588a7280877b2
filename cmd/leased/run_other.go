//go:build !unix

package main

import (
	"context"
	"errors"
)

var errNoRun = errors.New("run is not available on this system: it has no process groups and no signals, so a lease that cannot be " +
	"renewed could not end what the command has started; all other commands are available")

func runUnder(context.Context, streams, *runOptions) error {
	return &exitStatus{status: statusRunUnavailable, err: errNoRun}
}

func runGuard(streams) error { return errNoRun }
