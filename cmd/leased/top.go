package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// What top asks Redis for one refresh is bounded, however many keys and locks there are.
const (
	topScans = 300 // calls of SCAN, so some 15 ms of the server's time in all
	topLooks = 200 // locks, one script each
)

func topCommand(std streams) *cobra.Command {
	var at address
	var interval time.Duration
	var times int
	c := &cobra.Command{
		Use:   "top [PATTERN]",
		Short: "Watch locks, owners, queues and waits",
		Long: "Shows the locks that are held or waited for, those with the longest queues first, again and again until interrupted. WAIT is how " +
			"long top has seen the longest of the waiting processes wait; Redis does not know when they came. Each refresh costs Redis a " +
			"bounded number of small commands: with very many keys, new locks appear only after some refreshes.",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("top takes one pattern at most; put it in quotes")
			}
			return nil
		},
		RunE: interruptible(func(ctx context.Context, args []string) error {
			if err := checkInterval(interval); err != nil {
				return err
			}
			if times < 0 {
				return usagef("--count must not be negative, as %d is", times)
			}
			pattern := "*"
			if len(args) == 1 {
				pattern = args[0]
			}
			rdb, err := at.connectWhole(ctx)
			if err != nil {
				return err
			}
			defer rdb.Close()
			t := newTop(rdb, at.prefix, pattern)
			ctx, stop := context.WithCancelCause(ctx)
			defer stop(nil)
			shown := 0
			patient := times == 0 // whoever counts does not wait for Redis to come back
			err = repeat(ctx, std, watching{interval: interval, pictures: true, patient: patient}, func() (func() error, error) {
				if err := t.refresh(ctx, time.Now()); err != nil {
					t.scan = newScan(t.prefix, t.pattern) // the nodes that it walks over may be gone
					return nil, inPlainWords(err)
				}
				return func() error {
					rows := 0
					if isTerminal(std.out) {
						rows = max(heightOf(std.out)-5, 3)
					}
					t.show(std.out, time.Now(), rows)
					if shown++; shown == times {
						stop(errEnough)
					}
					return nil
				}, nil
			})
			if errors.Is(context.Cause(ctx), errEnough) {
				return nil
			}
			return err
		}),
	}
	at.bindOne(c)
	c.Flags().DurationVar(&interval, "interval", 2*time.Second, "`PERIOD` between refreshes (default 2s)")
	c.Flags().IntVar(&times, "count", 0, "end after `N` refreshes")
	return c
}

var errEnough = errors.New("enough refreshes were shown")

// top knows the locks it has found so far. Only one goroutine may use it.
type top struct {
	rdb     redis.UniversalClient
	server  *redisserver.Server
	prefix  string
	pattern string
	scan    *scan
	locks   map[string]*watched
	walked  bool // all keys have been seen once
	partial bool // there were more locks than are inspected for one refresh
}

// watched is a lock as it was when top last looked at it.
type watched struct {
	name    string
	looked  time.Time
	state   string // see lockState; or moves
	owner   string
	left    time.Duration
	since   time.Time // zero if it is not known
	queue   int
	waiting map[string]time.Time // when each request was first seen
}

// moves is the state of a lock that cannot be read because a Cluster moves its slot.
const moves = "slot moves"

func newTop(rdb redis.UniversalClient, prefix, pattern string) *top {
	return &top{
		rdb: rdb, server: redisserver.New(rdb, prefix), prefix: prefix, pattern: pattern,
		scan: newScan(prefix, pattern), locks: map[string]*watched{},
	}
}

// refresh continues the walk over the keys and looks at the locks that it knows.
func (t *top) refresh(ctx context.Context, now time.Time) error {
	for range topScans {
		if t.scan.over() {
			t.scan, t.walked = newScan(t.prefix, t.pattern), true
			break
		}
		names, err := t.scan.step(ctx, t.rdb)
		if err != nil {
			return err
		}
		for _, name := range names {
			if t.locks[name] == nil {
				t.locks[name] = &watched{name: name, state: "free"}
			}
		}
	}
	// Locks that were busy come first, then those that have not been looked at for the longest
	// time.
	all := make([]*watched, 0, len(t.locks))
	for _, w := range t.locks {
		all = append(all, w)
	}
	slices.SortFunc(all, func(a, b *watched) int {
		if x, y := min(a.queue, 1), min(b.queue, 1); x != y {
			return y - x
		}
		return cmp.Or(a.looked.Compare(b.looked), strings.Compare(a.name, b.name))
	})
	t.partial = len(all) > topLooks
	for _, w := range all[:min(len(all), topLooks)] {
		keys, err := protocol.NewKeys(t.prefix, w.name)
		if err != nil {
			return err
		}
		s, err := t.server.Inspect(ctx, &keys)
		switch {
		case err == nil:
			w.look(&s, now)
		case isMoving(err):
			*w = watched{name: w.name, looked: now, state: moves, owner: "-"}
			continue
		case redisserver.Classify(err).Kind == protocol.OtherType:
			delete(t.locks, w.name)
			continue
		default:
			return err
		}
		if w.state == "free" && w.queue == 0 && s.Meta == "" {
			delete(t.locks, w.name) // Redis has forgotten it
		}
	}
	return nil
}

// look takes over what Redis says, none of which is assumed to be well-formed.
func (w *watched) look(s *protocol.Snapshot, now time.Time) {
	w.looked, w.left, w.queue, w.since = now, s.Left, s.Length, time.Time{}
	var info leased.Info
	id, err := protocol.ParseID(s.Value)
	switch {
	case s.Value == "":
	case s.Value == protocol.MarkerValue:
		for i := 0; i < len(s.Readers); i += 2 {
			id, _ := protocol.ParseID(s.Readers[i]) // without a label if it is none
			info.Owners = append(info.Owners, leased.Owner{Client: id.Label, Shared: true})
		}
	case err != nil:
		who, kept := protocol.ParseCooldown(s.Value)
		info.Owners = []leased.Owner{{Client: who.Label, Unlocked: kept}}
	default:
		info.Owners = []leased.Owner{{Client: id.Label}}
		_, w.since = protocol.ParseMeta(s.Meta)
	}
	w.state, w.owner = lockState(info), ownersName(info.Owners)
	waiting := make(map[string]time.Time, len(s.Queue))
	for _, id := range s.Queue {
		waiting[id] = now
		if first, seen := w.waiting[id]; seen {
			waiting[id] = first
		}
	}
	w.waiting = waiting
}

// wait returns how long the longest waiter has been seen.
func (w *watched) wait(now time.Time) time.Duration {
	longest := time.Duration(0)
	for _, first := range w.waiting {
		longest = max(longest, now.Sub(first))
	}
	return longest
}

var topColumns = []column{
	{title: "NAME", least: 10},
	{title: "STATE"},
	{title: "OWNER", least: 8},
	{title: "QUEUE", right: true},
	{title: "WAIT", right: true},
	{title: "HELD", right: true},
	{title: "LEFT", right: true},
}

// show prints what was found, with at most most rows, or with all rows if most is 0.
func (t *top) show(out io.Writer, now time.Time, most int) {
	var busy []*watched
	waiting, moving := 0, 0
	for _, w := range t.locks {
		if w.state != "free" || w.queue > 0 {
			busy = append(busy, w)
			waiting += w.queue
		}
		if w.state == moves {
			moving++
		}
	}
	slices.SortFunc(busy, func(a, b *watched) int {
		if a.state != b.state && (a.state == moves || b.state == moves) { // those that can be read come first
			return map[bool]int{true: 1, false: -1}[a.state == moves]
		}
		return cmp.Or(b.queue-a.queue, strings.Compare(a.name, b.name))
	})
	width := widthOf(out)
	summary := fmt.Sprintf("%s held or waited for, %s waiting", count(len(busy)-moving, "lock", "locks"), count(waiting, "process", "processes"))
	if moving > 0 {
		summary += fmt.Sprintf("; %s cannot be read while the Cluster moves the slot", count(moving, "lock", "locks"))
	}
	switch {
	case !t.walked:
		summary += "; still looking for more"
	case t.partial:
		summary += fmt.Sprintf("; %d are looked at for each refresh", topLooks)
	}
	hang(out, "", summary, width)
	if most > 0 && len(busy) > most {
		busy = busy[:most]
	}
	rows := make([][]string, len(busy))
	for i, w := range busy {
		row := []string{printable(w.name), w.state, w.owner, strconv.Itoa(w.queue), "-", "-", "-"}
		if w.queue > 0 {
			row[4] = brief(w.wait(now))
		}
		if w.state != "free" && w.state != moves {
			row[6] = brief(w.left)
		}
		if !w.since.IsZero() {
			row[5] = brief(max(0, now.Sub(w.since)))
		}
		rows[i] = row
	}
	if len(rows) > 0 {
		for _, line := range table(topColumns, rows, width) {
			fmt.Fprintln(out, line)
		}
	}
}
