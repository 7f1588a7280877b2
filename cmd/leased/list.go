package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// listOptions are the flags of ls, and its pattern.
type listOptions struct {
	at          address
	pattern     string
	limit       int
	all, asJSON bool
}

func (o *listOptions) bind(c *cobra.Command) {
	o.at.bindOne(c)
	f := c.Flags()
	f.BoolVar(&o.asJSON, "json", false, "print a line of JSON for each lock")
	f.BoolVar(&o.all, "all", false, "also locks that are free, as long as Redis remembers them")
	f.IntVar(&o.limit, "limit", 1000, "list `N` locks at most")
}

func listCommand(std streams) *cobra.Command {
	o := listOptions{pattern: "*"}
	c := &cobra.Command{
		Use:   "ls [PATTERN]",
		Short: "List the locks that are held or waited for",
		Long: "Lists the locks that are held or waited for, whose names match PATTERN: * stands for any text, ? for one character, " +
			"[a-z] for one of several. Redis is read with SCAN, in small steps. A lock that only clients of other libraries have " +
			"used, and that has no queue of Leased, is not known; inspect shows it.",
		Example: "  leased ls 'invoice:*'",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("ls takes one pattern at most; put it in quotes")
			}
			return nil
		},
		RunE: interruptible(func(ctx context.Context, args []string) error {
			if o.limit < 1 {
				return usagef("--limit must be 1 or more, not %d", o.limit)
			}
			if len(args) == 1 {
				o.pattern = args[0]
			}
			return list(ctx, std, &o)
		}),
	}
	o.bind(c)
	return c
}

func list(ctx context.Context, std streams, o *listOptions) error {
	rdb, err := o.at.connectWhole(ctx)
	if err != nil {
		return err
	}
	defer rdb.Close()
	client, err := newClient(rdb, o.at.prefix)
	if err != nil {
		return err
	}
	defer client.Close() // it holds nothing, so there is no error to report

	found, err := o.collect(ctx, rdb, client)
	if err != nil {
		return o.at.explain(err)
	}
	return o.print(std, found)
}

// listing is what ls has found.
type listing struct {
	infos  []leased.Info // by name
	moving []string      // the names of locks that cannot be read while a Cluster moves their slots
	more   bool          // there are more locks than the limit
}

// collect walks over the keys and inspects the locks to list. Locks are inspected while the scan for more goes
// on, so that the limit counts the locks that are shown.
func (o *listOptions) collect(ctx context.Context, rdb redis.UniversalClient, client *leased.Client) (found listing, err error) {
	var batch []string
	flush := func() error {
		infos, unread, err := inspectAll(ctx, client, batch)
		found.moving = append(found.moving, unread...)
		batch = batch[:0]
		for _, info := range infos {
			if o.all || len(info.Owners) > 0 || info.Queue > 0 {
				found.infos = append(found.infos, info)
			}
		}
		return err
	}
	seen := map[string]bool{} // a lock has two keys, and SCAN may return a key twice
	for s := newScan(o.at.prefix, o.pattern); !s.over() && len(found.infos) <= o.limit && len(found.moving) <= o.limit; {
		names, err := s.step(ctx, rdb)
		names = slices.DeleteFunc(names, func(name string) bool { return seen[name] })
		if err == nil && !o.all {
			names, err = s.inUse(ctx, names)
		}
		if err != nil {
			return found, err
		}
		for _, name := range names {
			seen[name] = true
		}
		batch = append(batch, names...)
		if len(batch) >= 64 {
			if err := flush(); err != nil {
				return found, err
			}
		}
	}
	if err := flush(); err != nil {
		return found, err
	}
	slices.SortFunc(found.infos, func(a, b leased.Info) int { return strings.Compare(a.Name, b.Name) })
	if found.more = len(found.infos) > o.limit; found.more {
		found.infos = found.infos[:o.limit]
	}
	slices.Sort(found.moving)
	return found, nil
}

// print prints what was found, and on standard error what is missing there.
func (o *listOptions) print(std streams, found listing) error {
	switch now := time.Now(); {
	case o.asJSON:
		out := json.NewEncoder(std.out)
		for _, info := range found.infos {
			if err := out.Encode(jsonOf(info, now)); err != nil {
				return err
			}
		}
	case len(found.infos) > 0:
		rows := make([][]string, len(found.infos))
		for i, info := range found.infos {
			row := rowOf(info.Name, info.Owners, info.Queue)
			rows[i] = row.fields(now)
		}
		for _, line := range table(lockColumns, rows, widthOf(std.out)) {
			fmt.Fprintln(std.out, line)
		}
	case len(found.moving) == 0:
		fmt.Fprintf(std.err, "leased: %s\n", noLocks(o.pattern, o.all))
	}
	if found.more {
		fmt.Fprintf(std.err, "leased: there are more than %d: give a pattern, or --limit\n", o.limit)
	}
	if len(found.moving) == 0 {
		return nil
	}
	names := strings.Join(found.moving[:min(len(found.moving), 10)], ", ")
	if others := len(found.moving) - 10; others > 0 {
		names += fmt.Sprintf(" and %d more", others)
	}
	those := count(len(found.moving), "lock", "locks")
	if len(found.moving) > o.limit {
		those += " and perhaps more" // the scan has ended there
	}
	fmt.Fprintf(std.err, "leased: %s cannot be read while the Cluster moves the slot; if that lasts, see redis-cli --cluster check: %s\n", those, names)
	return errReported
}

// noLocks says that the list is empty, which might otherwise be taken for a failure.
func noLocks(pattern string, all bool) string {
	which, what := "locks", "held or waited for"
	if pattern != "*" {
		which = fmt.Sprintf("locks that match %q", pattern)
	}
	if all {
		what = "known"
	}
	return fmt.Sprintf("no %s are %s", which, what)
}

var lockColumns = []column{
	{title: "NAME", least: 10},
	{title: "STATE"},
	{title: "OWNER", least: 8},
	{title: "QUEUE", right: true},
	{title: "LEFT", right: true},
	{title: "HELD", right: true},
	{title: "SINCE"},
}

// lockRow is a lock as ls and top show it in one line.
type lockRow struct {
	name, state, owner string
	queue              int
	left               string
	since              time.Time // by Redis's clock; zero if it is not known
}

// rowOf returns the row of a lock. Of several owners it tells of the first.
func rowOf(name string, owners []leased.Owner, queue int) lockRow {
	row := lockRow{name: printable(name), state: lockState(owners), owner: ownersName(owners), queue: queue, left: "-"}
	if len(owners) > 0 {
		row.left, row.since = brief(owners[0].TTL), owners[0].Since
	}
	return row
}

// held is the time since since, which is by Redis's clock, until now by ours, so it is not exact.
func (r *lockRow) held(now time.Time) string {
	if r.since.IsZero() {
		return "-"
	}
	return brief(max(0, now.Sub(r.since)))
}

// fields returns the row as ls shows it.
func (r *lockRow) fields(now time.Time) []string {
	since := "-"
	if !r.since.IsZero() {
		since = r.since.Local().Format("2006-01-02 15:04:05 -07:00")
	}
	return []string{r.name, r.state, r.owner, strconv.Itoa(r.queue), r.left, r.held(now), since}
}

// ownersName names the first owner, and says how many more there are.
func ownersName(owners []leased.Owner) string {
	if len(owners) == 0 {
		return "-"
	}
	text := printable(owners[0].Client)
	if owners[0].Client == "" {
		text = "(" + writerOf(owners[0].Value) + ")"
	}
	if more := len(owners) - 1; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// inspectAll inspects several locks, eight at a time. It leaves out locks whose keys have another
// type, and returns the names of those that a Cluster cannot show while it moves their slots.
func inspectAll(ctx context.Context, client *leased.Client, names []string) (found []leased.Info, moving []string, err error) {
	infos := make([]leased.Info, len(names))
	failures := make([]error, len(names))
	var group sync.WaitGroup
	next := make(chan int)
	for range min(8, len(names)) {
		group.Go(func() { // ends when next is closed; waited for below
			for i := range next {
				infos[i], failures[i] = client.Inspect(ctx, names[i])
			}
		})
	}
	for i := range names {
		next <- i
	}
	close(next)
	group.Wait()
	for i, info := range infos {
		switch {
		case failures[i] == nil:
			found = append(found, info)
		case isMoving(failures[i]):
			moving = append(moving, printable(names[i]))
		case redisserver.Classify(failures[i]).Kind != protocol.OtherType:
			return found, moving, failures[i]
		}
	}
	return found, moving, nil
}

// isMoving reports whether a Cluster refused a command because it is moving the slot of its keys.
func isMoving(err error) bool { return redis.HasErrorPrefix(err, "TRYAGAIN") }
