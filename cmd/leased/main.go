// Command leased runs commands under a lock in Redis, and shows what such locks are doing.
//
//	leased run backup -- /usr/local/bin/backup.sh
//	leased inspect backup
//	leased demo
//
// "leased help" lists its commands; docs/cli.md explains them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Exit statuses; success is 0. Those of run are in run.go.
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

// output is standard output. It remembers the first error, which those who print do not look at.
// Only one goroutine may use it.
type output struct {
	io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if o.err == nil && err != nil {
		o.err = fmt.Errorf("cannot write the output: %w", err)
	}
	return n, err
}

func main() {
	quietRedis()
	os.Exit(run(context.Background(), streams{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:]))
}

// run executes a command line and returns the exit status.
func run(ctx context.Context, std streams, args []string) int {
	out := &output{Writer: std.out}
	std.out = out
	root := newRoot(std)
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	if out.err != nil && (err == nil || errors.Is(out.err, err) || errors.Is(err, errReported)) {
		err = out.err // what was to be read is not there
	}
	if c != nil && c.Name() == "run" {
		return concludeRun(std, err)
	}
	return conclude(std, err)
}

// conclude prints err, if any, and returns the exit status for it.
func conclude(std streams, err error) int {
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		complain(std, err)
		fmt.Fprintln(std.err, "Run 'leased help' for usage.")
		return statusUsage
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(std.err, "leased: stopped")
		return statusInterrupted
	case errors.Is(err, errReported):
		return statusFailed
	}
	complain(std, err)
	return statusFailed
}

// complain prints err. Like this program's own lines, the library's errors begin with "leased: ".
func complain(std streams, err error) { fmt.Fprintf(std.err, "leased: %s\n", bare(err)) }

// bare returns the text of an error without the library's name.
func bare(err error) string { return strings.TrimPrefix(err.Error(), "leased: ") }

// usageError is a mistake in the command line.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

var (
	// errInterrupted is returned when the user interrupted the command.
	errInterrupted = errors.New("interrupted")
	// errReported is returned when the command has already said what is wrong.
	errReported = errors.New("reported")
)
