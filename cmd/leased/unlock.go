package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
)

func unlockCommand(std streams) *cobra.Command {
	var at address
	var force, yes bool
	c := &cobra.Command{
		Use:   "unlock --force NAME",
		Short: "Take a lock from its owner",
		Long: "Takes a lock from its owner and lets the next waiter in. If the owner uses Leased, it is told, and the context of its " +
			"work ends. It may work on for as long as it does not heed that, so use this only for an owner that you know to be gone or wrong. Callers of its own process wait until it unlocks, so one that never will has to be restarted. If nobody owns the lock, nothing is done. Unless --yes is given, " +
			"it asks.",
		Example: "  leased unlock --force migrations",
		Args:    oneName,
		RunE: interruptible(func(ctx context.Context, args []string) error {
			if !force {
				return usagef("unlock takes a lock from its owner, and therefore requires --force")
			}
			if !yes && !isTerminal(std.in) {
				return usagef("unlock cannot ask for confirmation: standard input is not a terminal; use --yes")
			}
			return forceUnlock(ctx, std, &at, args[0], yes)
		}),
	}
	at.bind(c)
	c.ValidArgsFunction = at.completeNames
	c.Flags().BoolVar(&force, "force", false, "required, because the owner may still be at work")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

// forceUnlock takes a lock from its owner. It asks before, unless sure.
func forceUnlock(ctx context.Context, std streams, at *address, name string, sure bool) error {
	conn, err := at.open(ctx, name)
	if err != nil {
		return err
	}
	defer conn.close()
	client := conn.client
	info, err := client.Inspect(ctx, name)
	if err != nil {
		if cause := errors.Unwrap(err); cause != nil && !errors.Is(err, leased.ErrInvalidName) {
			err = fmt.Errorf("unlocking lock %q by force: %w", name, cause) // to inspect it was our idea
		}
		return operatorError(at, "unlock", err)
	}
	if len(info.Owners) == 0 {
		fmt.Fprintf(std.out, "%q is free.\n", info.Name)
		if hint := conn.hint(ctx, info, false); hint != "" {
			fmt.Fprintf(std.err, "leased: %s\n", hint)
		}
		return nil
	}
	if other := conn.alias(ctx, name); other != nil {
		return usagef("%s", other.says())
	}
	for !sure {
		describe(std.out, info)
		if yes, err := asks(ctx, std, "Take it from its owner, who may still be at work? [y/N] "); err != nil || !yes {
			return err
		}
		asked := info
		if info, err = client.Inspect(ctx, name); err != nil {
			return operatorError(at, "unlock", err)
		}
		if len(info.Owners) == 0 {
			fmt.Fprintf(std.out, "%q is free.\n", info.Name)
			return nil
		}
		if sure = noneIsNew(asked.Owners, info.Owners); !sure {
			fmt.Fprintln(std.out, "Nothing was changed, because the lock has another owner now:")
		}
	}
	evicted, err := client.ForceUnlock(ctx, name)
	switch {
	case err != nil:
		return operatorError(at, "unlock", err)
	case evicted == 0:
		fmt.Fprintf(std.out, "%q was unlocked before it was taken from %s.\n", info.Name, ownersText(info.Owners))
	case info.Servers > 0:
		fmt.Fprintf(std.out, "%q was taken from %s on %d of %d servers.\n%s", info.Name, ownersText(info.Owners), evicted, info.Servers, leftText(info.Owners))
	default:
		fmt.Fprintf(std.out, "%q was taken from %s.\n%s", info.Name, ownersText(info.Owners), leftText(info.Owners))
	}
	return nil
}

// leftText says for whom a lock is not free that was taken from its owners: who waits inside of their
// processes waits for their Unlock, of which Redis knows nothing. It returns "" if no owner can have such
// callers.
func leftText(owners []leased.Owner) string {
	at := slices.DeleteFunc(slices.Clone(owners), func(o leased.Owner) bool { return o.Client == "" || o.Unlocked })
	switch {
	case len(at) == 0:
		return ""
	case !at[0].Shared:
		return fmt.Sprintf("Callers of %s itself wait until it unlocks; if it never will, restart it.\n", ownersText(at))
	case len(at) == 1: // its readers still share the lock with further ones
		return fmt.Sprintf("Writers of %s itself wait until its readers unlock; if they never will, restart it.\n", ownersText(at))
	}
	return "Writers of these processes wait until the readers of their own process unlock; if those never will, restart it.\n"
}

// noneIsNew reports whether all who own the lock now owned it before.
func noneIsNew(before, now []leased.Owner) bool {
	for _, o := range now {
		same := func(b leased.Owner) bool { return b.Client == o.Client && b.Token == o.Token && b.Value == o.Value }
		if !slices.ContainsFunc(before, same) {
			return false
		}
	}
	return true
}

func ownersText(owners []leased.Owner) string {
	var names []string
	for _, o := range owners {
		names = append(names, clientText(o))
	}
	if len(names) > 3 {
		names = append(names[:3:3], fmt.Sprintf("%d more", len(owners)-3))
	}
	return strings.Join(names, ", ")
}

// asks asks a yes-or-no question. Any answer but yes means no.
func asks(ctx context.Context, std streams, question string) (bool, error) {
	fmt.Fprint(std.out, question)
	answer := make(chan string, 1)
	// This is owned by the process, and not waited for, because nothing interrupts its read.
	go func() {
		line, _ := bufio.NewReader(std.in).ReadString('\n') // no answer means no
		answer <- line
	}()
	select {
	case <-ctx.Done():
		fmt.Fprintln(std.out)
		return false, errInterrupted
	case line := <-answer:
		yes := slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(line)))
		if !yes {
			fmt.Fprintln(std.out, "Nothing was changed.")
		}
		return yes, nil
	}
}
