//go:build unix

package faults

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/redis/go-redis/v9"
)

func init() {
	roles["reader"] = readOften
	roles["writer"] = writeOften
	roles["sitter"] = sit
	roles["leaver"] = downgradeAfterTheEnd
}

// guard is how processes notice each other: a script, so that one look is one
// instant. It counts readers and the writer in and out and answers how many of
// the others were inside.
const guard = `
	redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
	redis.call('PEXPIRE', KEYS[1], 60000)
	local others = tonumber(redis.call('HGET', KEYS[1], 'writers') or '0')
	if ARGV[1] == 'writers' then
		others = others - math.max(0, tonumber(ARGV[2])) + tonumber(redis.call('HGET', KEYS[1], 'readers') or '0')
	end
	return others`

func inside(ctx context.Context, a *actor, who string, f func() error) error {
	look := func(step int) error {
		n, err := a.rdb.Eval(ctx, guard, []string{a.prefix + "inside"}, who, step).Int()
		if err == nil && n != 0 {
			err = fmt.Errorf("among %s: %d who must not be there", who, n)
		}
		return err
	}
	return errors.Join(look(1), f(), look(-1))
}

// readOften reads without a pause until it is told to stop.
func readOften(a *actor) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	say("ready")
	if a.told() == "" {
		return nil
	}
	told := make(chan struct{})
	go func() { // ended by the parent's word or its end, and waited for below
		defer close(told)
		a.told()
		stop()
	}()
	reads := 0
	for ctx.Err() == nil {
		l, err := a.client.RWMutex("x").RLockContext(context.Background())
		if err != nil {
			return err
		}
		err = inside(context.Background(), a, "readers", func() error { time.Sleep(time.Millisecond); return nil })
		if err := errors.Join(err, l.Unlock()); err != nil {
			return err
		}
		reads++
	}
	<-told
	say("read %d", reads)
	return nil
}

// writeOften writes every 10 ms for 2 s.
func writeOften(a *actor) error {
	ctx := context.Background()
	say("ready")
	a.told()
	writes, longest := 0, time.Duration(0)
	beat := time.NewTicker(10 * time.Millisecond)
	defer beat.Stop()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); <-beat.C {
		began := time.Now()
		l, err := a.client.RWMutex("x").LockContext(ctx)
		if err != nil {
			return err
		}
		longest = max(longest, time.Since(began))
		err = inside(ctx, a, "writers", func() error { return nil })
		if err := errors.Join(err, l.Unlock()); err != nil {
			return err
		}
		writes++
	}
	say("wrote %d %d", writes, longest.Milliseconds())
	return nil
}

func TestProcessesThatReadAndOneThatWritesAllGetTheirTurn(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	var readers []*child
	for range 4 {
		readers = append(readers, spawn(t, "reader", s.Addr, prefix, 5*time.Second))
	}
	writer := spawn(t, "writer", s.Addr, prefix, 5*time.Second)
	for _, c := range append(readers, writer) {
		c.hear("ready")
	}
	for _, c := range append(readers, writer) {
		c.tell("go")
	}
	said := writer.hear("wrote")
	writes, _ := strconv.Atoi(said[0])
	longest, err := strconv.Atoi(said[1])
	if err != nil || writes < 20 || longest > 500 {
		t.Errorf("%d writes in 2s, one waited %d ms, %v", writes, longest, err)
	}
	writer.end()
	total := 0
	for _, c := range readers {
		c.tell("stop")
		reads, err := strconv.Atoi(c.hear("read")[0])
		if err != nil || reads < 20 {
			t.Errorf("a process read %d times, %v", reads, err)
		}
		total += reads
		c.end()
	}
	if left := rdb.HMGet(t.Context(), prefix+"inside", "readers", "writers").Val(); fmt.Sprint(left) != "[0 0]" {
		t.Errorf("readers and writers still inside: %v", left)
	}
	t.Logf("%d writes, the longest waited %d ms; %d reads", writes, longest, total)
}

// sit reads until its input ends.
func sit(a *actor) error {
	l, err := a.client.RWMutex("x").RLockContext(context.Background())
	if err != nil {
		return err
	}
	say("reads %d", l.Token())
	a.told()
	return l.Unlock()
}

func TestAKilledReadersTTLDelaysAWriterAndAnotherReadersDoesNot(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	c := newClient(t, rdb, prefix)
	lasting := spawn(t, "sitter", s.Addr, prefix, time.Minute)
	lasting.hear("reads")
	dies := spawn(t, "sitter", s.Addr, prefix, time.Second)
	dies.hear("reads")
	got := wait(within(t, patience), c.Mutex("x"))
	queued(t, c, "x", 1)
	dies.signal(syscall.SIGKILL)
	killed := time.Now()
	lasting.end() // it unlocks
	select {
	case o := <-got:
		t.Fatalf("entered %v after the kill, beside the lease of the one killed: %v", o.at.Sub(killed), o.err)
	default:
	}
	o := entered(t, got)
	if late := o.at.Sub(killed); late > time.Second+slack {
		t.Errorf("the writer entered %v after the kill of a reader with a TTL of 1s", late)
	}
	mustUnlock(t, o.lease)
}

// A stopped reader is taken for alive until its lease ends, and learns of its
// loss when it goes on.
func TestAStoppedReaderLetsAWriterInWhenItsLeaseEnds(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	c := newClient(t, rdb, prefix)
	stops := spawn(t, "sitter", s.Addr, prefix, 500*time.Millisecond)
	token, err := strconv.ParseUint(stops.hear("reads")[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	stops.signal(syscall.SIGSTOP)
	stopped := time.Now()
	o := entered(t, wait(within(t, patience), c.Mutex("x")))
	if late := o.at.Sub(stopped); late > 500*time.Millisecond+slack {
		t.Errorf("the writer entered %v after the stop of a reader with a TTL of 500ms", late)
	}
	if o.lease.Token() <= token {
		t.Errorf("token %d after %d", o.lease.Token(), token)
	}
	stops.signal(syscall.SIGCONT)
	_ = stops.stdin.Close()
	if line := <-stops.lines; line != "failed "+leased.ErrLeaseLost.Error() {
		t.Errorf("its Unlock said %q", line)
	}
	if err := o.lease.Context().Err(); err != nil {
		t.Errorf("it harmed the writer: %v", context.Cause(o.lease.Context()))
	}
	mustUnlock(t, o.lease)
}

// downgradeAfterTheEnd holds a lease beyond the end of its client.
func downgradeAfterTheEnd(a *actor) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	l, err := a.client.RWMutex("x").LockContext(context.Background())
	if err != nil {
		return err
	}
	if err := a.client.Shutdown(ctx); !errors.Is(err, leased.ErrClosed) {
		return fmt.Errorf("shut down with a lease inside: %w", err)
	}
	short, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	say("downgraded %t", l.Downgrade(short) == nil)
	_ = l.Unlock() // its TTL ends it
	return nil
}

// In a process of its own: the mistake to be found here exhausts the stack.
func TestADowngradeAfterTheEndOfItsClientFails(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	c := spawn(t, "leaver", s.Addr, prefix, time.Second)
	if said := c.hear("downgraded"); said[0] != "false" {
		t.Error("a client that had ended downgraded a lease")
	}
	c.end()
	eventually(t, "the TTL ends the lease", func() bool {
		return errors.Is(rdb.Get(t.Context(), prefix+"x").Err(), redis.Nil)
	})
}
