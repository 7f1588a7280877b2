// Command leased shows what the library does, and what a lock in Redis is doing.
//
//	go run github.com/leasedmutex/leased/cmd/leased@latest demo
//
// "leased help" lists its commands.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Exit statuses; success is 0.
const (
	statusFailed      = 1
	statusUsage       = 2
	statusInterrupted = 130 // what shells report for a program ended by Ctrl-C
)

// streams are the standard streams, for tests to replace.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// command is one word after "leased".
type command struct {
	name    string
	args    string // for its usage line
	summary string // one line; a command without one is not listed
	run     func(ctx context.Context, std streams, args []string) error
}

// commands is a function rather than a variable, because help is a command and lists them
// all.
func commands() []command {
	return []command{
		{"demo", "[flags]", "sell a stock to buyers in several processes, without a lock and with it", runDemo},
		{"inspect", "NAME [flags]", "show who owns a lock and who waits for it", runInspect},
		{"version", "", "print the version", runVersion},
		{"help", "[COMMAND]", "explain a command", runHelp},
		{workerCommand, "", "", runWorker},
	}
}

func main() {
	quietRedis()
	std := streams{os.Stdin, os.Stdout, os.Stderr}
	if len(os.Args) > 1 && os.Args[1] == workerCommand {
		os.Exit(run(context.Background(), std, os.Args[1:])) // its parent decides when it ends
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal, a second one ends the process at once, as by default.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, std, os.Args[1:]))
}

// run executes a command line and returns the exit status.
func run(ctx context.Context, std streams, args []string) int {
	return conclude(std, dispatch(ctx, std, args))
}

// conclude prints err, if any, and returns the exit status for it.
func conclude(std streams, err error) int {
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(std.err, "leased: %v\nRun 'leased help' for usage.\n", err)
		return statusUsage
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(std.err, "leased: stopped")
		return statusInterrupted
	}
	fmt.Fprintf(std.err, "leased: %v\n", err)
	return statusFailed
}

func dispatch(ctx context.Context, std streams, args []string) error {
	if len(args) == 0 {
		return usagef("no command given")
	}
	name := args[0]
	switch name {
	case "-h", "-help", "--help":
		name = "help"
	case "-v", "-version", "--version":
		name = "version"
	}
	for _, c := range commands() {
		if c.name == name {
			return c.run(ctx, std, args[1:])
		}
	}
	return usagef("there is no command %q", name)
}

// usageError is a mistake in the command line.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// errInterrupted is returned when the user interrupted the command.
var errInterrupted = errors.New("interrupted")
