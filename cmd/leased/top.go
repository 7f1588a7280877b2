package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
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
	topScans  = 300  // calls of SCAN, and of EXISTS about all that one found: at most some 40 ms of the server's time
	topChecks = 5000 // calls of EXISTS about one lock, to which the last page of names may add its own
	topLooks  = 200  // locks, one script each
	topAgain  = 100  // of these, those that are shown first, so that their rows stay
)

func topCommand(std streams) *cobra.Command {
	var at address
	var interval time.Duration
	var times int
	c := &cobra.Command{
		Use:   "top [PATTERN]",
		Short: "Watch locks, owners, queues and waits",
		Long: fmt.Sprintf("Shows the locks that are held or waited for, those with the longest queues first, again and again until interrupted. WAIT is how "+
			"long top has seen the longest of the waiting processes wait; Redis does not know when they came. Each refresh costs Redis a "+
			"bounded number of small commands: with very many keys, new locks appear only after some refreshes. All rows are as of the last "+
			"refresh: if more than %[1]d locks are in use, top looks at %[1]d of them, first at those with the longest queues, and only says "+
			"how many more there are.", topLooks),
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
				return usagef("--count must be 0 or more, not %d", times)
			}
			pattern := "*"
			if len(args) == 1 {
				pattern = args[0]
			}
			return watchTop(ctx, std, &at, pattern, interval, times)
		}),
	}
	at.bindOne(c)
	c.Flags().DurationVar(&interval, "interval", 2*time.Second, "`DURATION` between refreshes")
	c.Flags().IntVar(&times, "count", 0, "end after `N` refreshes")
	return c
}

// watchTop shows the locks that match pattern, times often, or until interrupted if times is 0.
func watchTop(ctx context.Context, std streams, at *address, pattern string, interval time.Duration, times int) error {
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
			return nil, at.explain(err)
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
}

var errEnough = errors.New("enough refreshes were shown")

// top knows the locks it has found in use, and not those that only have a last token: a service may use
// a new name for each request. Only one goroutine may use it.
type top struct {
	rdb     redis.UniversalClient
	server  *redisserver.Server
	prefix  string
	pattern string
	scan    *scan
	locks   map[string]*watched
	turn    int  // number of the refresh, from 1
	began   int  // the refresh at which the walk over the keys began
	walked  bool // all keys have been seen once
	partial bool // there are more locks than are looked at for one refresh
}

// watched is a lock as it was when top last looked at it. Its times are numbers of refreshes, 0 for never.
type watched struct {
	name    string
	found   int                  // when it was taken up
	seen    int                  // when it was last found in use, or met by the walk although it is looked at each time
	looked  int                  // when it was last looked at
	freed   int                  // since when it has been neither held nor waited for
	waited  bool                 // the walk has met it with an owner and a queue since the last look
	row     lockRow              // empty before the first look
	waiting map[string]time.Time // when each request was first seen
}

func newTop(rdb redis.UniversalClient, prefix, pattern string) *top {
	return &top{
		rdb: rdb, server: redisserver.New(rdb, prefix), prefix: prefix, pattern: pattern,
		scan: newScan(prefix, pattern), locks: map[string]*watched{}, began: 1,
	}
}

// refresh continues the walk over the keys and looks at the locks that it knows.
func (t *top) refresh(ctx context.Context, now time.Time) error {
	t.turn++
	if err := t.find(ctx); err != nil {
		return err
	}
	for _, w := range t.choose() {
		keys, err := protocol.NewKeys(t.prefix, w.name)
		if err != nil {
			return err
		}
		s, err := t.server.Inspect(ctx, &keys)
		switch {
		case err == nil:
			w.look(&s, t.turn, now)
		case isMoving(err):
			row := rowOf(w.name, nil, 0)
			row.state = stateMoves
			*w = watched{name: w.name, seen: t.turn, looked: t.turn, row: row}
		case redisserver.Classify(err).Kind == protocol.OtherType:
			delete(t.locks, w.name)
		default:
			return err
		}
	}
	return nil
}

// find continues the walk over the keys, and takes up the locks that are in use.
func (t *top) find(ctx context.Context) error {
	checks := 0
	for range topScans {
		if t.scan.over() {
			// The walk has met every lock that was in use all the time. Redis may have forgotten the
			// others, unless they were in use at the last look, which may be that of the refresh before.
			maps.DeleteFunc(t.locks, func(_ string, w *watched) bool { return w.seen < t.began-1 })
			t.scan, t.began, t.walked = newScan(t.prefix, t.pattern), t.turn+1, true
			return nil
		}
		if checks >= topChecks {
			return nil
		}
		names, err := t.scan.step(ctx, t.rdb)
		if err != nil {
			return err
		}
		n, err := t.take(ctx, names)
		if err != nil {
			return err
		}
		checks += n
	}
	return nil
}

// take takes up the locks that the last step of the walk found, if they are in use, forgets the others,
// and returns how many of them Redis was asked about one by one. It does not ask about locks that are
// looked at for each refresh, or that it has met in this one.
func (t *top) take(ctx context.Context, names []string) (checks int, err error) {
	var doubtful []string
	for _, name := range names {
		if w := t.locks[name]; w != nil && (!t.partial || w.seen == t.turn) {
			w.seen = t.turn
		} else {
			doubtful = append(doubtful, name)
		}
	}
	counts, checks, err := t.scan.used(ctx, doubtful)
	if err != nil {
		return 0, err
	}
	for i, name := range doubtful {
		if counts[i] == 0 {
			delete(t.locks, name)
			continue
		}
		w := t.locks[name]
		if w == nil {
			w = &watched{name: name, found: t.turn}
			t.locks[name] = w
		}
		w.seen, w.waited = t.turn, counts[i] == 2
	}
	return checks, nil
}

// choose returns the locks to look at. The first are those that were shown first. The others are shared
// out so that neither many new locks nor many old ones keep the rest from a look. It forgets free locks
// if there are too many to look at all; before that, they may be in use again.
func (t *top) choose() []*watched {
	var known, found []*watched
	for _, w := range t.locks {
		if w.looked == 0 {
			found = append(found, w)
		} else {
			known = append(known, w)
		}
	}
	slices.SortFunc(known, byRank)
	for n := len(known) - 1; n >= 0 && known[n].freed > 0 && len(t.locks) > topLooks; n-- {
		delete(t.locks, known[n].name)
		known = known[:n]
	}
	t.partial = len(t.locks) > topLooks
	again := min(len(known), topAgain)
	old, room := known[again:], topLooks-again
	slices.SortFunc(old, byTurn)
	slices.SortFunc(found, byTurn)
	found = found[:min(len(found), max(room/2, room-len(old)))]
	old = old[:min(len(old), room-len(found))]
	return slices.Concat(known[:again], found, old)
}

// byTurn orders locks that have to wait for a look: those with a queue come first, because they may belong
// at the top of the rows.
func byTurn(a, b *watched) int {
	switch {
	case a.waited && !b.waited:
		return -1
	case b.waited && !a.waited:
		return 1
	}
	return cmp.Or(a.looked-b.looked, a.found-b.found, strings.Compare(a.name, b.name))
}

// byRank orders locks as they are shown: those that cannot be read come behind those that are busy, and
// the free ones last, those that were busy most recently first.
func byRank(a, b *watched) int {
	return cmp.Or(a.class()-b.class(), b.row.queue-a.row.queue, b.freed-a.freed, strings.Compare(a.name, b.name))
}

func (w *watched) class() int {
	switch {
	case w.freed > 0:
		return 2
	case w.row.state == stateMoves:
		return 1
	}
	return 0
}

// look takes over what Redis says.
func (w *watched) look(s *protocol.Snapshot, turn int, now time.Time) {
	requests, number := s.Waiting()
	var owners []leased.Owner
	for _, o := range s.Owners() {
		owners = append(owners, leased.Owner(o))
	}
	w.looked, w.waited, w.row = turn, false, rowOf(w.name, owners, number)
	switch {
	case w.row.state != stateFree || number > 0:
		w.seen, w.freed = turn, 0
	case w.freed == 0:
		w.freed = turn
	}
	waiting := make(map[string]time.Time, len(requests))
	for _, id := range requests {
		waiting[id] = now
		if first, seen := w.waiting[id]; seen {
			waiting[id] = first
		}
	}
	w.waiting = waiting
}

// fields returns the row as top shows it. WAIT is how long the longest waiter has been seen.
func (w *watched) fields(now time.Time) []string {
	wait := "-"
	if w.row.queue > 0 {
		wait = brief(w.wait(now))
	}
	return []string{w.row.name, w.row.state, w.row.owner, strconv.Itoa(w.row.queue), wait, w.row.left, w.row.held(now)}
}

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
	{title: "LEFT", right: true},
	{title: "HELD", right: true},
}

// show prints what this refresh has found, with at most most rows, or with all rows if most is 0.
func (t *top) show(out io.Writer, now time.Time, most int) {
	var busy []*watched
	waiting, moving, others := 0, 0, 0
	for _, w := range t.locks {
		switch {
		case w.looked < t.turn:
			others++ // it may be free by now
			continue
		case w.freed > 0:
			continue
		case w.row.state == stateMoves:
			moving++
		}
		busy = append(busy, w)
		waiting += w.row.queue
	}
	slices.SortFunc(busy, byRank)
	width := widthOf(out)
	summary := fmt.Sprintf("%s held or waited for, %s waiting", count(len(busy)-moving, "lock", "locks"), count(waiting, "process", "processes"))
	if moving > 0 {
		summary += fmt.Sprintf("; %s cannot be read while the Cluster moves the slot", count(moving, "lock", "locks"))
	}
	if others > 0 {
		summary += fmt.Sprintf("; %d more were not looked at for this refresh", others)
	}
	if !t.walked {
		summary += "; still looking for more"
	}
	hang(out, "", summary, width)
	if most > 0 && len(busy) > most {
		busy = busy[:most]
	}
	rows := make([][]string, len(busy))
	for i, w := range busy {
		rows[i] = w.fields(now)
	}
	if len(rows) > 0 {
		for _, line := range table(topColumns, rows, width) {
			fmt.Fprintln(out, line)
		}
	}
}
