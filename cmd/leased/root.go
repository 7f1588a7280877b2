package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newRoot returns the command "leased" with all of its subcommands. It keeps no state between
// calls.
func newRoot(std streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "leased",
		Short: "Locks in Redis, on the command line",
		Long: "Leased is a distributed mutex on Redis. This program runs commands under its locks, " +
			"and shows and repairs locks that programs hold.",
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
		Args:          noArguments,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		Version:       version(),

		SuggestionsMinimumDistance: 2,
	}
	root.SetIn(std.in)
	root.SetOut(std.out)
	root.SetErr(std.err)
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(
		runCommand(std), inspectCommand(std), listCommand(std), topCommand(std), unlockCommand(std),
		doctorCommand(std), benchCommand(std), demoCommand(std), versionCommand(std),
		workerCommandOf(std), guardCommand(std), manCommand(std),
	)
	root.SetVersionTemplate(versionLine())
	root.SetHelpFunc(explain)
	root.SetHelpCommand(helpCommand())
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			explainCompletion(c)
		}
	}
	return root
}

// explainCompletion has cobra's command for completion scripts explain itself as the other commands do, and
// refuse wrong arguments, which cobra takes for a request to explain it.
func explainCompletion(c *cobra.Command) {
	c.Short = "Print a completion script for a shell"
	c.Long = "Prints a completion script for a shell: bash, zsh, fish or powershell. The script completes names of locks, too."
	c.Args = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usagef("completion is for bash, zsh, fish and powershell, not for %s", shown(args[0]))
		}
		return nil
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	for _, shell := range c.Commands() {
		shell.Short = "Print the script for " + shell.Name()
		shell.Long = "Prints the completion script for " + shell.Name() + "."
		shell.Args = noArguments
		switch shell.Name() {
		case "bash":
			shell.Long += " It needs the package bash-completion. The first command below is for the current shell, the second for all new " +
				"ones; on macOS, the directory is $(brew --prefix)/etc/bash_completion.d."
			shell.Example = "  source <(leased completion bash)\n  leased completion bash > /etc/bash_completion.d/leased"
		case "zsh":
			shell.Long += " The first command below switches completion on, and belongs in ~/.zshrc. The second is for the current shell, the " +
				"third for all new ones; on macOS, the directory is $(brew --prefix)/share/zsh/site-functions."
			shell.Example = "  autoload -U compinit; compinit\n  source <(leased completion zsh)\n  leased completion zsh > \"${fpath[1]}/_leased\""
		case "fish":
			shell.Long += " The first command below is for the current shell, the second for all new ones."
			shell.Example = "  leased completion fish | source\n  leased completion fish > ~/.config/fish/completions/leased.fish"
		case "powershell":
			shell.Long += " The command below is for the current shell; for all new ones, put it into your profile."
			shell.Example = "  leased completion powershell | Out-String | Invoke-Expression"
		}
	}
}

// flagError says which values a flag takes, in other words than those of package strconv.
func flagError(c *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		f := invalid.GetFlag()
		takes := map[string]string{
			"duration": "a duration such as 30s",
			"float64":  "seconds, such as 10",
			"int":      "a whole number",
			"bool":     "no value",
		}[f.Value.Type()]
		if takes != "" {
			return usagef("--%s takes %s, not %s", f.Name, takes, shown(invalid.GetValue()))
		}
	}
	if strings.Contains(err.Error(), "://") { // -redis=URL, say, of which each letter is a flag
		return usagef("%s: an unknown flag is followed by %s", c.Name(), shown(err.Error()))
	}
	return usagef("%s: %v", c.Name(), err)
}

// interruptible makes a command end when the user presses Ctrl-C. After the first signal, a second
// one ends the process at once, as it does by default. Do not use it for run, which passes signals
// on, nor for the processes that this program starts for itself.
func interruptible(f func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		context.AfterFunc(ctx, stop)
		err := f(ctx, args)
		if ctx.Err() != nil && (err != nil || c.Context().Err() != nil) {
			return errInterrupted // any other error is a consequence
		}
		return err
	}
}

func noArguments(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if !c.HasParent() {
		suggestion := ""
		if near := c.SuggestionsFor(args[0]); len(near) > 0 {
			suggestion = fmt.Sprintf("; is it %q?", near[0])
		}
		return usagef("there is no command %s%s", shown(args[0]), suggestion)
	}
	return usagef("%s takes no arguments, only flags: what is %s?", c.Name(), shown(args[0]))
}

// shown quotes what the user typed in a wrong place, unless it may be a URL, which can have a password.
func shown(arg string) string {
	if strings.Contains(arg, "://") {
		return "this URL (pass the address of Redis with --redis, or set $LEASED_REDIS)"
	}
	return strconv.Quote(arg)
}

func oneName(c *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s takes the name of one lock", c.Name())
	}
	return nil
}

func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command",
		Long:  "Explains a command, or lists all commands.",
		ValidArgsFunction: func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			var names []string
			for _, other := range c.Root().Commands() {
				if other.IsAvailableCommand() && len(args) == 0 {
					names = append(names, other.Name()+"\t"+other.Short)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("help takes one command at most")
			}
			about := c.Root()
			for _, other := range c.Root().Commands() {
				if len(args) == 1 && other.Name() == args[0] && (other.IsAvailableCommand() || other.Name() == "help") {
					about = other
				}
			}
			if len(args) == 1 && about == c.Root() {
				return usagef("there is no command %s", shown(args[0]))
			}
			return about.Help()
		},
	}
}

// explain prints help in lines that fit the terminal.
func explain(c *cobra.Command, _ []string) {
	out := c.OutOrStdout()
	width := min(proseWidth(out), 100)
	c.InitDefaultHelpFlag()
	about := c.Long
	if about == "" {
		about = c.Short + "."
	}
	hang(out, "usage: ", usageLine(c), width)
	for _, paragraph := range strings.Split(about, "\n") {
		fmt.Fprintln(out)
		for _, line := range wrap(paragraph, width) {
			fmt.Fprintln(out, line)
		}
	}
	if c.Example != "" {
		fmt.Fprintf(out, "\nexamples:\n%s\n", c.Example)
	}
	if c.HasAvailableSubCommands() {
		fmt.Fprintln(out, "\ncommands:")
		for _, other := range c.Commands() {
			if !other.IsAvailableCommand() && other.Name() != "help" {
				continue
			}
			hang(out, fmt.Sprintf("  %-11s", other.Name()), other.Short, width)
		}
		if !c.HasParent() {
			fmt.Fprintln(out)
			hang(out, "", "'leased help COMMAND' lists a command's flags.", width)
		}
	}
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			flags.AddFlag(f)
		}
	})
	if flags.HasFlags() {
		fmt.Fprintln(out, "\nflags:")
		explainFlags(out, flags, width)
	}
}

func usageLine(c *cobra.Command) string {
	use := c.CommandPath() + strings.TrimPrefix(c.Use, c.Name())
	switch {
	case !c.HasParent():
		return use + " COMMAND"
	case c.HasAvailableSubCommands():
		return use + " SHELL"
	case strings.Contains(use, "[flags]") || !hasFlags(c):
		return use
	}
	return use + " [flags]"
}

// hasFlags reports whether a command has flags besides --help.
func hasFlags(c *cobra.Command) bool {
	has := false
	c.LocalFlags().VisitAll(func(f *pflag.Flag) { has = has || !f.Hidden && f.Name != "help" })
	return has
}

// explainFlags lists flags. pflag's own list is as wide as its longest flag, and breaks words on a
// narrow terminal.
func explainFlags(out io.Writer, flags *pflag.FlagSet, width int) {
	flags.VisitAll(func(f *pflag.Flag) {
		fmt.Fprintln(out, "  "+flagName(f))
		hang(out, "        ", usageOf(f), width)
	})
}

// usageOf returns what a flag does, and its default. Only a default that is not a plain value is in the
// flag's own text.
func usageOf(f *pflag.Flag) string {
	_, usage := pflag.UnquoteUsage(f)
	switch f.DefValue {
	case "", "false", "0", "0s", "-1": // without the flag, there is nothing to say
		return usage
	}
	return fmt.Sprintf("%s (default %s)", usage, f.DefValue)
}

// flagName returns the flag as a user types it, with the name of its value.
func flagName(f *pflag.Flag) string {
	var text bytes.Buffer
	if f.Shorthand != "" {
		fmt.Fprintf(&text, "-%s, ", f.Shorthand)
	}
	text.WriteString("--" + f.Name)
	if value, _ := pflag.UnquoteUsage(f); value != "" {
		text.WriteString(" " + value)
	}
	return text.String()
}

func versionCommand(std streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Long:  "Prints the version of this program and of Go, and the system it was built for.",
		Args:  noArguments,
		RunE: func(*cobra.Command, []string) error {
			_, err := io.WriteString(std.out, versionLine())
			return err
		},
	}
}

func versionLine() string {
	return fmt.Sprintf("leased %s %s %s/%s\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}

// completeNames completes the name of a lock from those that Redis knows.
func (a *address) completeNames(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	ctx, cancel := context.WithTimeout(c.Context(), completionTime)
	defer cancel()
	rdb, err := a.connect(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer rdb.Close()
	var names []string
	err = scanLocks(ctx, rdb, a.prefix, globQuote(typed)+"*", func(name string) bool {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		return len(names) < 200
	})
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
