package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

func runHelp(ctx context.Context, std streams, args []string) error {
	if len(args) == 1 && slices.Contains([]string{"help", "-h", "-help", "--help"}, args[0]) {
		args = nil
	}
	switch len(args) {
	case 0:
		fmt.Fprintln(std.out, "Leased is a distributed mutex on Redis. This is its command line.")
		fmt.Fprintln(std.out)
		for _, c := range commands() {
			if c.summary != "" {
				fmt.Fprintf(std.out, "  leased %-8s  %s\n", c.name, c.summary)
			}
		}
		fmt.Fprintln(std.out, "\n'leased help COMMAND' lists a command's flags.")
		return nil
	case 1:
		for _, c := range commands() {
			if c.name == args[0] && c.summary != "" {
				return c.run(ctx, std, []string{"--help"})
			}
		}
		return usagef("there is no command %q", args[0])
	}
	return usagef("help takes one command at most")
}

func runVersion(_ context.Context, std streams, args []string) error {
	flags := newFlags("version")
	if done, err := flags.parse(std.out, args); done || err != nil {
		return err
	}
	if len(flags.words) > 0 {
		return usagef("version takes no arguments")
	}
	version := "(unknown)"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
	}
	fmt.Fprintf(std.out, "leased %s %s %s/%s\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}

// flagSet is a flag.FlagSet that allows flags after arguments, returns its errors, and
// prints flags with two dashes.
type flagSet struct {
	*flag.FlagSet
	words []string // the arguments; Args has only those after the last flag
}

func newFlags(name string) *flagSet {
	f := &flagSet{FlagSet: flag.NewFlagSet(name, flag.ContinueOnError)}
	f.SetOutput(io.Discard)
	return f
}

// parse parses args. done means that they asked for help, which parse has printed.
func (f *flagSet) parse(out io.Writer, args []string) (done bool, err error) {
	for {
		switch err := f.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			f.explain(out)
			return true, nil
		case err != nil:
			return false, usagef("%s: %v", f.Name(), err)
		}
		// Parse stops at the first argument, or after "--", which only arguments follow.
		rest := f.Args()
		if len(rest) == 0 {
			return false, nil
		}
		if at := len(args) - len(rest); at > 0 && args[at-1] == "--" {
			f.words = append(f.words, rest...)
			return false, nil
		}
		f.words = append(f.words, rest[0])
		args = rest[1:]
	}
}

// given reports whether a flag was set on the command line.
func (f *flagSet) given(name string) bool {
	found := false
	f.Visit(func(g *flag.Flag) { found = found || g.Name == name })
	return found
}

func (f *flagSet) explain(out io.Writer) {
	for _, c := range commands() {
		if c.name == f.Name() && c.summary != "" {
			fmt.Fprintf(out, "leased %s %s\n\n%s.\n", c.name, c.args, strings.ToUpper(c.summary[:1])+c.summary[1:])
		}
	}
	first := true
	f.VisitAll(func(g *flag.Flag) {
		if first {
			fmt.Fprintln(out)
			first = false
		}
		value, usage := flag.UnquoteUsage(g)
		fmt.Fprintf(out, "  --%-14s  %s\n", g.Name+" "+value, usage)
	})
}
