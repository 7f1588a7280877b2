package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func manCommand(std streams) *cobra.Command {
	return &cobra.Command{
		Use:   "man",
		Short: "Print the manual page",
		Long:  "Prints the manual page; read it with: leased man | man -l -",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := io.WriteString(std.out, manual(c.Root()))
			return err
		},
	}
}

// manual returns the page leased(1), made from the help texts. cobra's own generator makes a page
// for each command, and needs a Markdown library.
func manual(root *cobra.Command) string {
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	text := func(s string) {
		for i, paragraph := range strings.Split(s, "\n") {
			if i > 0 {
				line(".PP")
			}
			line("%s", roff(paragraph))
		}
	}
	line(`.TH LEASED 1 "" "leased" "User Commands"`)
	line(".SH NAME\nleased \\- %s", roff(strings.ToLower(root.Short[:1])+root.Short[1:]))
	line(".SH SYNOPSIS")
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			line(".B %s\n.br", roff(usageLine(c)))
		}
	}
	line(".SH DESCRIPTION")
	text(root.Long)
	line(".SH COMMANDS")
	shared := address{}
	common := &cobra.Command{}
	shared.bind(common)
	for _, c := range root.Commands() {
		if !c.IsAvailableCommand() {
			continue
		}
		line(".SS %s", roff(usageLine(c)))
		text(c.Long)
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden || f.Name == "help" || common.Flags().Lookup(f.Name) != nil && c.Name() != "demo" {
				return
			}
			manualFlag(line, f)
		})
		if c.Example != "" {
			line(".PP\nExamples:\n.PP\n.nf\n%s\n.fi", roff(c.Example))
		}
	}
	line(".SH WHERE REDIS IS")
	text("These flags are the same for all commands except demo, which has a Redis of its own, and those that need none.")
	common.Flags().VisitAll(func(f *pflag.Flag) { manualFlag(line, f) })
	line(".SH ENVIRONMENT")
	for _, v := range [][2]string{
		{"LEASED_REDIS, REDIS_URL", "Where Redis is, unless --redis says it; the first that is set. A URL may hold a password, which other users of the machine can read on a command line, but not here."},
		{"LEASED_NAME, LEASED_TOKEN", "Set by run for its command: the lock, and the fencing token of the lease."},
		{"NO_COLOR", "If it is not empty, output has no colors."},
		{"COLUMNS", "The width of output that does not go to a terminal. If it is not set, help and doctor use 80 columns there, and the others never cut or break a line."},
	} {
		line(".TP\n.B %s\n%s", roff(v[0]), roff(v[1]))
	}
	line(".SH EXIT STATUS")
	text("0 if all went well, 1 if not, 2 for a mistake in the command line, 130 after Ctrl-C, but 0 for top and inspect --watch, which end that way. Those of run are described with it.")
	line(".SH SEE ALSO\n.BR flock (1),\n.BR redis-cli (1)")
	return out.String()
}

func manualFlag(line func(string, ...any), f *pflag.Flag) {
	line(".TP\n.B %s\n%s", roff(flagName(f)), roff(usageOf(f)))
}

// roff escapes text so that it appears unchanged.
func roff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`, "…", `\[u2026]`).Replace(s)
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}
