// Command tracing shows who waits for whom: three processes of an order service
// contend for one stock lock, and Jaeger tells the story.
//
//	go run .          everything, with a Jaeger of its own
//	go run . --help   what else there is
//
// Read stock.go first: it is what an application writes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `Three processes of an order service contend for one stock lock, and send their
traces to Jaeger. Then it is asked who waited for whom.

    go run . [flags]

Without flags it starts all it needs on free loopback ports, and ends it: a Jaeger,
built from source the first time (2 to 5 minutes), redis-server or, without one in
PATH, an embedded stand-in, and the three processes.

Flags:
`

// Exit statuses; success is 0.
const (
	statusFailed      = 1
	statusUsage       = 2
	statusInterrupted = 130 // what shells say of a program ended by Ctrl-C
)

// streams are the standard streams, for tests to replace.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// options are the command line.
type options struct {
	redis  string // URL; empty: one of our own
	otlp   string // host:port; empty: a Jaeger of our own
	jaeger string // URL of the query side that belongs to otlp
	keep   bool
	save   string
	orders int
	stock  int
	think  time.Duration
}

func main() {
	quiet()
	std := streams{os.Stdin, os.Stdout, os.Stderr}
	if len(os.Args) > 1 && os.Args[1] == serveCommand {
		os.Exit(conclude(std, serve(context.Background(), std))) // its parent says when to end
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal a second one ends the process at once, as without us.
	context.AfterFunc(ctx, stop)
	os.Exit(conclude(std, run(ctx, std, os.Args[1:])))
}

// run carries out a command line.
func run(ctx context.Context, std streams, args []string) error {
	o, err := parse(std, args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	s := &show{options: o, screen: newScreen(std.out), stderr: &together{out: std.err}}
	err = errors.Join(s.perform(ctx), s.end())
	if ctx.Err() != nil {
		return errInterrupted // whatever it broke on its way
	}
	return err
}

func parse(std streams, args []string) (o options, err error) {
	flags := flag.NewFlagSet("tracing", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // mistakes are told once, by conclude
	flags.StringVar(&o.redis, "redis", "", "`URL` of a Redis that runs already, such as redis://localhost:6379/0")
	flags.StringVar(&o.otlp, "otlp", "", "`HOST:PORT` of a collector that runs already and takes OTLP over HTTP, such as localhost:4318")
	flags.StringVar(&o.jaeger, "jaeger", "", "with --otlp: `URL` of the Jaeger behind it, such as http://localhost:16686, to ask it")
	flags.BoolVar(&o.keep, "keep", false, "keep Jaeger up until Ctrl-C")
	flags.StringVar(&o.save, "save", "", "write Jaeger's answer about the two traces shown to `FILE`, for ./picture")
	flags.IntVar(&o.orders, "orders", 12, "`N` orders, from six customers")
	flags.IntVar(&o.stock, "stock", 10, "`N` pieces in stock")
	flags.DurationVar(&o.think, "think", 60*time.Millisecond, "`TIME` that an order is thought about, inside the lock")
	err = flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(std.out, usage)
		flags.SetOutput(std.out)
		flags.PrintDefaults()
		return o, err
	}
	switch {
	case err != nil:
		return o, usagef("%v", err)
	case flags.NArg() > 0:
		return o, usagef("there are no arguments, only flags: what is %q?", flags.Arg(0))
	case o.jaeger != "" && o.otlp == "":
		return o, usagef("--jaeger needs --otlp: where should the traces go?")
	case o.keep && o.otlp != "":
		return o, usagef("--keep keeps a Jaeger that was started here; with --otlp there is none")
	case o.save != "" && o.otlp != "" && o.jaeger == "":
		return o, usagef("--save needs an answer: tell the Jaeger behind --otlp with --jaeger")
	case o.orders < 2 || o.orders > 1000:
		return o, usagef("--orders must be from 2 to 1000, not %d", o.orders)
	case o.stock < 0 || o.stock > 1000:
		return o, usagef("--stock must be from 0 to 1000, not %d", o.stock)
	case o.think < 0 || o.think > time.Second:
		return o, usagef("--think must be from 0s to 1s, not %v", o.think)
	}
	return o, nil
}

// usageError is a mistake in the command line.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// errInterrupted says that the user asked us to stop.
var errInterrupted = errors.New("interrupted")

// conclude tells the user of err and returns the exit status for it.
func conclude(std streams, err error) int {
	var mistake *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &mistake):
		fmt.Fprintf(std.err, "tracing: %v\nSee 'go run . --help'.\n", err)
		return statusUsage
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(std.err, "tracing: stopped")
		return statusInterrupted
	}
	fmt.Fprintf(std.err, "tracing: %v\n", err)
	return statusFailed
}
