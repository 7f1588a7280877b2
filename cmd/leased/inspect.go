package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/leasedmutex/leased"
)

func runInspect(ctx context.Context, std streams, args []string) error {
	flags := newFlags("inspect")
	address := flags.String("redis", "redis://localhost:6379", "`URL` of the server (default redis://localhost:6379)")
	prefix := flags.String("prefix", "", "key `prefix` that the application gives to leased.WithKeyPrefix")
	if done, err := flags.parse(std.out, args); done || err != nil {
		return err
	}
	if len(flags.words) != 1 {
		return usagef("inspect takes the name of one lock")
	}

	rdb, err := connect(ctx, *address)
	if err != nil {
		return err
	}
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithKeyPrefix(*prefix))
	if err != nil {
		return usagef("inspect: %v", err)
	}
	defer client.Close() // it holds nothing, so there is no error to report

	info, err := client.Inspect(ctx, flags.words[0])
	switch {
	case errors.Is(err, leased.ErrInvalidName):
		return usagef("inspect: %v", err)
	case err != nil:
		return err
	}
	describe(std.out, info)
	return nil
}

// describe prints the state of a lock for people. Text that other programs put into Redis
// is quoted, because it is printed on a terminal.
func describe(out io.Writer, info leased.Info) {
	row := func(label, format string, args ...any) {
		fmt.Fprintf(out, "%-8s%s\n", label, fmt.Sprintf(format, args...))
	}
	row("lock", "%q", info.Name)
	switch {
	case len(info.Owners) == 0:
		row("state", "free")
	case info.Owners[0].Shared:
		row("state", "shared by readers of %s", count(len(info.Owners), "process", "processes"))
	case info.Owners[0].Unlocked:
		row("state", "unlocked, and kept until the end of its minimum hold")
	default:
		row("state", "held")
	}
	for _, owner := range info.Owners {
		row("owner", "%s", ownerText(owner))
	}
	if info.Queue > 0 {
		row("queue", "%s", count(info.Queue, "process", "processes"))
	}
	for i, waiting := range info.Waiting {
		reads := ""
		if waiting.Shared {
			reads = ", to read"
		}
		row("", "%d. %s%s", i+1, clientText(waiting.Client), reads)
	}
	if more := info.Queue - len(info.Waiting); more > 0 && len(info.Waiting) > 0 {
		row("", "and %d more", more)
	}
	if info.Token > 0 {
		row("token", "%d", info.Token)
	}
}

func ownerText(owner leased.Owner) string {
	text := clientText(owner.Client)
	if owner.Value != "" {
		text += fmt.Sprintf(" (value %.80q)", owner.Value)
	}
	if owner.TTL < 0 {
		text += ", never expires"
	} else {
		text += fmt.Sprintf(", %s left", seconds(owner.TTL))
	}
	if !owner.Since.IsZero() {
		text += ", since " + owner.Since.Local().Format("2006-01-02 15:04:05.000")
	}
	return text
}

func clientText(client string) string {
	if client == "" {
		return "a client of another library"
	}
	return fmt.Sprintf("%q", client)
}

// seconds formats durations that people wait for; milliseconds, those that are measured.
func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1000) }

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
