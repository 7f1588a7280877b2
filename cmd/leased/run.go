package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased/internal/protocol"
)

// Exit statuses of run, in addition to those of its command. They are the statuses of flock(1),
// which come from sysexits.h.
const (
	statusRunUsage       = 64 // EX_USAGE
	statusRunUnavailable = 69 // EX_UNAVAILABLE: no Redis, no such command
	statusRunLost        = 75 // EX_TEMPFAIL: the lease was lost before the command had ended
)

// runOptions are the flags of run.
type runOptions struct {
	at       address
	name     string
	argv     []string
	noWait   bool
	wait     float64 // seconds; negative: no bound
	conflict int
	shared   bool
	ttl      time.Duration
	atLeast  time.Duration
}

const minRunTTL = time.Second // a tenth of the TTL is the margin in which a command is killed

func runCommand(std streams) *cobra.Command {
	o := runOptions{}
	c := &cobra.Command{
		Use:   "run [flags] NAME -- COMMAND [ARGUMENT...]",
		Short: "Run a command while holding a lock",
		Long: "Waits for the lock NAME, runs COMMAND, and gives the lock back, like flock(1), but for all machines that use one Redis.\n" +
			"The lock is held on a lease. If it cannot be renewed, COMMAND and the processes it started are told to end (TERM) when a third of " +
			"the lease is left, and killed when a tenth is left, so that none is at work when another machine gets the lock. They are told at " +
			"once if the lock was taken away. COMMAND finds the lock's name in LEASED_NAME and its fencing token in LEASED_TOKEN.\n" +
			"The exit status is COMMAND's, or 128 + the number of the signal that ended COMMAND or the wait. It is 75 if the lease was lost while " +
			"COMMAND ran, whatever COMMAND ended with. If COMMAND did not run: 1 (or that of -E) if the lock was not free in time, 64 for a usage " +
			"error, 69 if Redis is unavailable or refuses the lock, or COMMAND does not exist.",
		Example: "  leased run nightly -n -- backup.sh\n  leased run deploy -w 300 -- ./deploy",
	}
	c.Args = func(c *cobra.Command, args []string) error {
		switch dash := c.ArgsLenAtDash(); {
		case dash == 0 && len(args) > 1 && args[1] == "--": // a name that begins with a dash
			if len(args) == 2 {
				return usagef(`run needs a command after "--"`)
			}
			return nil
		case dash < 0:
			return usagef(`run needs "--" before the command: leased run NAME -- COMMAND`)
		case dash != 1:
			return usagef(`run takes the name of one lock before "--", not %d`, dash)
		case len(args) == 1:
			return usagef(`run needs a command after "--"`)
		}
		return nil
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		o.name, o.argv = args[0], args[1:]
		if c.ArgsLenAtDash() == 0 {
			o.argv = args[2:]
		}
		switch {
		case c.Flags().Changed("wait") && !(o.wait >= 0 && o.wait <= 1e9): // which refuses NaN as well
			return usagef("--wait must be from 0 to 1e9 seconds, not %v", o.wait)
		case o.noWait && o.wait > 0:
			return usagef("--nonblock does not wait, so --wait has no meaning with it: choose one of them")
		case o.conflict < 0 || o.conflict > 255:
			return usagef("--conflict-exit-code must be from 0 to 255, not %d", o.conflict)
		case o.atLeast < 0 || o.atLeast > 30*24*time.Hour || o.atLeast%time.Millisecond != 0:
			return usagef("--at-least must be whole milliseconds up to 720h, not %v", o.atLeast)
		case o.atLeast > 0 && o.shared:
			return usagef("--at-least is for writers: it has no meaning with --shared")
		case o.ttl < minRunTTL || o.ttl > 24*time.Hour || o.ttl%time.Millisecond != 0:
			return usagef("--ttl must be whole milliseconds from %v to 24h, not %v", minRunTTL, o.ttl)
		case o.at.Quorum && o.at.quarantine == 0 && o.ttl > protocol.DefaultQuarantine:
			return usagef("with --quorum, a --ttl of more than a minute needs --quarantine, and every other process needs leased.WithQuarantine " +
				"with the same length")
		}
		if o.wait == 0 {
			o.noWait = true
		}
		return runUnder(c.Context(), std, &o)
	}
	o.at.bind(c)
	c.ValidArgsFunction = o.at.completeNames
	f := c.Flags()
	f.BoolVarP(&o.noWait, "nonblock", "n", false, "do not wait: fail if the lock is not free")
	f.Float64VarP(&o.wait, "wait", "w", -1, "wait this many `SECONDS` at most")
	f.IntVarP(&o.conflict, "conflict-exit-code", "E", 1, "exit `STATUS` if the lock was not free in time")
	f.BoolVarP(&o.shared, "shared", "s", false, "a reader's lock, which others have at the same time, but no writer")
	f.DurationVar(&o.atLeast, "at-least", 0, "keep the lock for this `DURATION`, however soon the command ends: for jobs that several machines start by "+
		"clocks that differ")
	f.DurationVar(&o.ttl, "ttl", protocol.DefaultTTL, "`DURATION` of the lease, which is renewed: how long the lock stays taken if this machine dies")
	return c
}

// exitStatus ends run with a status that run did not choose itself.
type exitStatus struct {
	status      int
	err         error // to be printed, if any
	interrupted bool  // killed by SIGINT, so this process must die of it, too
}

func (e *exitStatus) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.status)
	}
	return e.err.Error()
}

func (e *exitStatus) Unwrap() error { return e.err }

// concludeRun prints err, if any, and returns run's exit status for it.
func concludeRun(std streams, err error) int {
	var exit *exitStatus
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		if exit.err != nil {
			complain(std, exit.err)
		}
		return exit.status
	case errors.As(err, &usage):
		complain(std, err)
		return statusRunUsage
	}
	complain(std, err)
	return statusRunUnavailable
}

// guardName is the command of the process that kills another process's command. See run_unix.go.
const guardName = "run-guard"

func guardCommand(std streams) *cobra.Command {
	return &cobra.Command{
		Use: guardName, Hidden: true, Args: noArguments,
		RunE: func(*cobra.Command, []string) error { return runGuard(std) },
	}
}
