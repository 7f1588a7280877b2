//go:build unix

package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

func init() {
	roles["reader"] = readOften
	roles["writer"] = writeOften
	roles["sitter"] = sit
	roles["leaver"] = downgradeAfterTheEnd
}

// guard lets the processes notice each other. It is a script, so that each check is atomic. It
// counts readers and writers in and out, counts the calls of each process, and returns how many
// processes are inside that must not be.
const guard = `
	redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
	redis.call('HINCRBY', KEYS[1], ARGV[3], 1)
	redis.call('PEXPIRE', KEYS[1], 60000)
	local others = tonumber(redis.call('HGET', KEYS[1], 'writers') or '0')
	if ARGV[1] == 'writers' then
		others = others - math.max(0, tonumber(ARGV[2])) + tonumber(redis.call('HGET', KEYS[1], 'readers') or '0')
	end
	return others`

func inside(ctx context.Context, a *actor, who string, f func() error) error {
	look := func(step int) error {
		n, err := a.rdb.Eval(ctx, guard, []string{a.prefix + "inside"}, who, step, os.Getpid()).Int()
		if err == nil && n != 0 {
			err = fmt.Errorf("among %s: %d who must not be there", who, n)
		}
		return err
	}
	return errors.Join(look(1), f(), look(-1))
}

// untilTold repeats f between two words of the parent, or until the input ends.
func untilTold(a *actor, f func() error) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	say("ready")
	if a.told() == "" {
		return nil
	}
	told := make(chan struct{})
	go func() { // ended by the parent's word or the end of the input, and waited for below
		defer close(told)
		a.told()
		stop()
	}()
	for ctx.Err() == nil {
		if err := f(); err != nil {
			return err
		}
	}
	<-told
	return nil
}

// readOften reads without a pause, for a millisecond each time: so often that without a
// queue there would be no instant without a reader.
func readOften(a *actor) error {
	reads := 0
	err := untilTold(a, func() error {
		l, err := a.client.RWMutex("x").RLockContext(context.Background())
		if err != nil {
			return err
		}
		err = inside(context.Background(), a, "readers", func() error { time.Sleep(time.Millisecond); return nil }) // the reading
		reads++
		return errors.Join(err, l.Unlock())
	})
	say("read %d", reads)
	return err
}

// writeOften writes every 10 ms.
func writeOften(a *actor) error {
	ctx := context.Background()
	writes, longest := 0, time.Duration(0)
	beat := time.NewTicker(10 * time.Millisecond)
	defer beat.Stop()
	err := untilTold(a, func() error {
		<-beat.C
		began := time.Now()
		l, err := a.client.RWMutex("x").LockContext(ctx)
		if err != nil {
			return err
		}
		longest = max(longest, time.Since(began))
		err = inside(ctx, a, "writers", func() error { return nil })
		writes++
		return errors.Join(err, l.Unlock())
	})
	say("wrote %d %d", writes, longest.Milliseconds())
	return err
}

func TestProcessesThatReadAndOneThatWritesAllGetTheirTurn(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	strain := redistest.NewStrain(t)
	const ttl = 15 * time.Second // so long that a turn that came only when a TTL ended would be too late
	var readers []*child
	for range 4 {
		readers = append(readers, spawn(t, "reader", s.Addr, prefix, ttl))
	}
	writer := spawn(t, "writer", s.Addr, prefix, ttl)
	everybody := append(slices.Clone(readers), writer)
	for _, c := range everybody {
		c.hear("ready")
	}
	began := time.Now()
	for _, c := range everybody {
		c.tell("go")
	}
	eventually(t, "50 turns of everybody, while the others go on", func() bool {
		turns := rdb.HGetAll(t.Context(), prefix+"inside").Val()
		for _, c := range everybody {
			if n, _ := strconv.Atoi(turns[strconv.Itoa(c.cmd.Process.Pid)]); n < 2*50 { // in and out
				return false
			}
		}
		return true
	})
	total := 0
	for _, c := range readers {
		c.tell("stop")
		reads, err := strconv.Atoi(c.hear("read")[0])
		if err != nil {
			t.Error(err)
		}
		total += reads
		c.end()
	}
	writer.tell("stop")
	said := writer.hear("wrote")
	writes, _ := strconv.Atoi(said[0])
	longest, err := strconv.Atoi(said[1])
	// Re-checks are up to 3 s apart. Nobody should have to enter by one.
	if bound := time.Second + slack + strain.Since(began); err != nil || time.Duration(longest)*time.Millisecond > bound {
		t.Errorf("one of %d writes waited %d ms, %v", writes, longest, err)
	}
	writer.end()
	if left := rdb.HMGet(t.Context(), prefix+"inside", "readers", "writers").Val(); fmt.Sprint(left) != "[0 0]" {
		t.Errorf("readers and writers still inside: %v", left)
	}
	t.Logf("%d writes, the longest waited %d ms; %d reads", writes, longest, total)
}

// sit holds a reader's lease until its input ends.
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
	strain := redistest.NewStrain(t)
	c := newClient(t, rdb, prefix)
	for range 5 {
		lasting := spawn(t, "sitter", s.Addr, prefix, time.Minute)
		lasting.hear("reads")
		dies := spawn(t, "sitter", s.Addr, prefix, 2*time.Second)
		dies.hear("reads")
		got := wait(within(t, patience), c.Mutex("x"))
		queued(t, c, "x", 1)
		dies.kill(rdb)
		earliest, latest, owned := dies.owns(c)
		lasting.end() // it unlocks
		left := time.Now()
		o := entered(t, got)
		mustUnlock(t, o.lease)
		if !owned {
			t.Log("the machine took longer than a TTL to see the reader dead: once more")
			continue
		}
		if o.at.Before(earliest) {
			t.Errorf("the writer entered %v before the killed reader's lease ended", earliest.Sub(o.at))
		}
		if left.After(latest) {
			latest = left
		}
		if late := o.at.Sub(latest); late > slack+strain.Since(latest) {
			t.Errorf("the writer entered %v after the last reader was gone", late)
		}
		return
	}
	t.Error("five times the TTL ended before the reader's death could be observed")
}

// A stopped reader counts as alive until its lease ends, and learns of the loss when it
// continues.
func TestAStoppedReaderLetsAWriterInWhenItsLeaseEnds(t *testing.T) {
	s := redistest.Shared(t)
	rdb, prefix := s.Client(), redistest.Prefix(t)
	redistest.CheckLeaks(t, rdb, prefix)
	strain := redistest.NewStrain(t)
	const ttl = time.Second
	c := newClient(t, rdb, prefix)
	stops := spawn(t, "sitter", s.Addr, prefix, ttl)
	token, err := strconv.ParseUint(stops.hear("reads")[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	stops.signal(syscall.SIGSTOP)
	stopped := time.Now()
	o := entered(t, wait(within(t, patience), c.Mutex("x")))
	if late := o.at.Sub(stopped); late > ttl+slack+strain.Since(stopped) {
		t.Errorf("the writer entered %v after the stop of a reader with a TTL of %v", late, ttl)
	}
	if o.lease.Token() <= token {
		t.Errorf("token %d after %d", o.lease.Token(), token)
	}
	stops.signal(syscall.SIGCONT)
	_ = stops.stdin.Close()
	if line := <-stops.lines; !strings.HasPrefix(line, `failed leased: lock "x" lost (token `) {
		t.Errorf("its Unlock said %q", line)
	}
	if err := o.lease.Context().Err(); err != nil {
		t.Errorf("it harmed the writer: %v", context.Cause(o.lease.Context()))
	}
	mustUnlock(t, o.lease)
}

// downgradeAfterTheEnd keeps a lease beyond the end of its client, and then tries to downgrade it.
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
	a.ended = true
	short, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	say("downgraded %t", l.Downgrade(short) == nil)
	_ = l.Unlock() // its TTL ends it
	return nil
}

// This runs in a process of its own, because the bug it looks for exhausts the stack.
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
