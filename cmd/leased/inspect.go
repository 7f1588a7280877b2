package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
)

func inspectCommand(std streams) *cobra.Command {
	var at address
	var asJSON, watch bool
	var interval time.Duration
	c := &cobra.Command{
		Use:   "inspect NAME",
		Short: "Show who owns a lock and who waits for it",
		Long:  "Shows who owns a lock, since when, and how much longer, and who waits for it. It takes nothing and changes nothing.",
		Args:  oneName,
		RunE: interruptible(func(ctx context.Context, args []string) error {
			if err := checkInterval(interval); err != nil {
				return err
			}
			conn, err := at.open(ctx, args[0])
			if err != nil {
				return err
			}
			defer conn.close()
			var hint string
			var last use
			look := func() (show func() error, err error) {
				info, err := conn.client.Inspect(ctx, args[0])
				if err != nil {
					return nil, operatorError(&at, "inspect", err)
				}
				// To look for other prefixes has Redis go through all of its channels, so that is done only when
				// something else may be found.
				if now := useOf(info); now != last {
					hint, last = conn.hint(ctx, info, watch), now
				}
				said := hint
				return func() error {
					if asJSON {
						j := jsonOf(info, time.Now())
						j.Hint = said
						return json.NewEncoder(std.out).Encode(j)
					}
					describe(std.out, info)
					if said != "" {
						hang(std.out, "hint    ", said, widthOf(std.out))
					}
					return nil
				}, nil
			}
			if !watch {
				show, err := look()
				if err != nil {
					return err
				}
				return show()
			}
			return repeat(ctx, std, watching{interval: interval, pictures: !asJSON, patient: true}, look)
		}),
	}
	at.bind(c)
	c.ValidArgsFunction = at.completeNames
	c.Flags().BoolVar(&asJSON, "json", false, "print one line of JSON; durations are in seconds")
	c.Flags().BoolVar(&watch, "watch", false, "show it again and again, until interrupted")
	c.Flags().DurationVar(&interval, "interval", time.Second, "`DURATION` between refreshes, with --watch")
	return c
}

// operatorError distinguishes a mistake in a name from trouble with Redis.
func operatorError(at *address, command string, err error) error {
	if errors.Is(err, leased.ErrInvalidName) {
		return usagef("%s: %s", command, bare(err))
	}
	return at.explain(err)
}

func checkInterval(d time.Duration) error {
	if d < 50*time.Millisecond {
		return usagef("--interval must be 50ms or more, not %v", d)
	}
	return nil
}

// watching says how something is shown again and again.
type watching struct {
	interval time.Duration
	pictures bool // each has the time above it and, on a terminal, replaces the previous one
	patient  bool // once something was shown, an error of looking is only reported: a failover may be going on
}

// repeat looks, and shows what it saw, until ctx ends, which is no failure.
func repeat(ctx context.Context, std streams, w watching, look func() (show func() error, err error)) error {
	tick := time.NewTicker(w.interval)
	defer tick.Stop()
	shown, told := false, ""
	for {
		show, err := look()
		switch {
		case ctx.Err() != nil && show == nil: // the error is a consequence
			return nil
		case err != nil && !(shown && w.patient):
			return err
		case err != nil:
			if text := bare(err); text != told {
				told = text
				fmt.Fprintf(std.err, "leased: %s: %s; trying again\n", instant(time.Now()), text)
			}
		default:
			if w.pictures && isTerminal(std.out) {
				fmt.Fprint(std.out, "\x1b[H\x1b[2J")
			}
			if w.pictures {
				fmt.Fprintln(std.out, instant(time.Now()))
			}
			if err := show(); err != nil {
				return err
			}
			shown, told = true, ""
		}
		if o, ok := std.out.(*output); ok && o.err != nil {
			return o.err // nobody sees the next one either
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// describe prints the state of a lock for people. Text that other programs put into Redis
// is quoted, because it is printed on a terminal.
func describe(out io.Writer, info leased.Info) {
	width := widthOf(out)
	row := func(label, format string, args ...any) {
		hang(out, fmt.Sprintf("%-8s", label), fmt.Sprintf(format, args...), width)
	}
	row("lock", "%q", info.Name)
	row("state", "%s", stateText(info))
	for _, owner := range info.Owners {
		row("owner", "%s", ownerText(owner))
	}
	if info.Servers > 0 {
		row("servers", "%s", serversText(info))
	}
	if info.Queue > 0 {
		row("queue", "%s", count(info.Queue, "process", "processes"))
	}
	for i, waiting := range info.Waiting {
		reads := ""
		if waiting.Shared {
			reads = ", to read"
		}
		row("", "%d. %s%s", i+1, waiterText(waiting.Client), reads)
	}
	if more := info.Queue - len(info.Waiting); more > 0 && len(info.Waiting) > 0 {
		row("", "and %d more", more)
	}
	if info.Token > 0 {
		row("token", "%d", info.Token)
	}
}

// serversText says how many servers of a quorum stand behind what is shown.
func serversText(info leased.Info) string {
	text := fmt.Sprintf("%d of %d answered", info.Answered, info.Servers)
	if len(info.Owners) == 0 {
		return text
	}
	text += fmt.Sprintf(", %d of these name the owner", info.Behind)
	if info.Behind <= info.Servers/2 {
		text += ", which is not a majority"
	}
	return text
}

// The states of a lock, as they are shown.
const (
	stateFree   = "free"
	stateHeld   = "held"
	stateShared = "shared"     // by readers
	stateKept   = "kept"       // by a minimum hold
	stateMoves  = "slot moves" // only of top: it cannot be read because a Cluster moves its slot
)

// lockState returns the state of a lock that has these owners.
func lockState(owners []leased.Owner) string {
	switch {
	case len(owners) == 0:
		return stateFree
	case owners[0].Shared:
		return stateShared
	case owners[0].Unlocked:
		return stateKept
	}
	return stateHeld
}

func stateText(info leased.Info) string {
	switch state := lockState(info.Owners); state {
	case stateShared:
		return "shared by readers of " + count(len(info.Owners), "process", "processes")
	case stateKept:
		return "unlocked, and kept until the end of its minimum hold"
	default:
		return state
	}
}

func ownerText(owner leased.Owner) string {
	text := clientText(owner)
	if owner.Value != "" {
		text += fmt.Sprintf(" (value %.80q)", owner.Value)
	}
	if owner.TTL < 0 {
		text += ", never expires"
	} else {
		text += fmt.Sprintf(", %s left", seconds(owner.TTL))
	}
	if !owner.Since.IsZero() {
		text += ", since " + instant(owner.Since)
	}
	return text
}

// waiterText names one who waits. No other library has the same queue.
func waiterText(client string) string {
	if client == "" {
		return "another version of leased"
	}
	return fmt.Sprintf("%q", client)
}

// clientText names an owner.
func clientText(owner leased.Owner) string {
	if owner.Client == "" {
		return writerOf(owner.Value)
	}
	return fmt.Sprintf("%q", owner.Client)
}

// writerOf says what has written the value of an owner that does not name its client.
func writerOf(value string) string {
	if protocol.NewerFormat(value) {
		return "a later version of leased"
	}
	return "another library"
}

// use is what Redis says of the use of a lock.
type use int

const (
	_          use = iota
	inUse          // somebody owns it, or waits
	remembered     // it is free, and Redis has its last token
	unknown
)

func useOf(info leased.Info) use {
	switch {
	case len(info.Owners) > 0 || info.Queue > 0:
		return inUse
	case info.Token > 0:
		return remembered
	}
	return unknown
}

// jsonInfo is a lock as programs read it. Field names never change; fields are only added.
type jsonInfo struct {
	Name    string       `json:"name"`
	State   string       `json:"state"` // free, held, shared or kept
	At      time.Time    `json:"at"`    // when this was printed, by the local clock
	Token   uint64       `json:"token,omitempty"`
	Owners  []jsonOwner  `json:"owners"`
	Queue   int          `json:"queue"`
	Waiting []jsonWaiter `json:"waiting"`
	// For a quorum: how many servers it has, how many answered, and how many name the owner.
	Servers  int  `json:"servers,omitempty"`
	Answered int  `json:"answered,omitempty"`
	Behind   *int `json:"behind,omitempty"`
	// Hint says, for people, why this may not be the lock that they mean. Its words may change.
	Hint string `json:"hint,omitempty"`
}

type jsonOwner struct {
	Client string `json:"client"` // empty if another library, or a later version of this one, owns the lock
	Shared bool   `json:"shared"`
	// Unlocked says that the client no longer holds the lock, which a minimum hold keeps.
	Unlocked bool       `json:"unlocked,omitempty"`
	Left     *float64   `json:"left"` // seconds; null if it never expires
	Since    *time.Time `json:"since,omitempty"`
	Token    uint64     `json:"token,omitempty"`
	Value    string     `json:"value,omitempty"`
}

type jsonWaiter struct {
	Client string `json:"client"`
	Shared bool   `json:"shared"`
}

func jsonOf(info leased.Info, now time.Time) jsonInfo {
	j := jsonInfo{Name: info.Name, State: lockState(info.Owners), At: now, Token: info.Token, Queue: info.Queue, Owners: []jsonOwner{}, Waiting: []jsonWaiter{}}
	if info.Servers > 0 {
		j.Servers, j.Answered, j.Behind = info.Servers, info.Answered, &info.Behind
	}
	for _, o := range info.Owners {
		owner := jsonOwner{Client: o.Client, Shared: o.Shared, Unlocked: o.Unlocked, Token: o.Token, Value: o.Value}
		if o.TTL >= 0 {
			left := o.TTL.Seconds()
			owner.Left = &left
		}
		if !o.Since.IsZero() {
			owner.Since = &o.Since
		}
		j.Owners = append(j.Owners, owner)
	}
	for _, w := range info.Waiting {
		j.Waiting = append(j.Waiting, jsonWaiter(w))
	}
	return j
}
