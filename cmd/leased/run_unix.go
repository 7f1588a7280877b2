//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// A run is three processes: this one, which holds the lease; the guard; and the command. The
// command runs in the process group of the guard, so one signal reaches everything that it starts.
// If this process dies or is stopped, the guard, which ignores signals, kills the group: at once,
// or when the lease is about to end. The group exists before the command does, so the command never
// runs outside the group or without the terminal.

// When the lease has less time left than termMargin and still cannot be renewed, the command is
// told to end; at killMargin it is killed. A lease is renewed after a third of its TTL, so renewals
// have failed for a third of the TTL before the command is told anything.
func termMargin(ttl time.Duration) time.Duration { return ttl / 3 }
func killMargin(ttl time.Duration) time.Duration { return ttl / 10 }

// lookEvery is how often this process looks at what the lease has left. However long the TTL is, the guard
// does not wait long to hear from this process once the wall clock was set ahead; see deadline.
func lookEvery(ttl time.Duration) time.Duration { return min(ttl/30, 500*time.Millisecond) }

// askTime bounds how long Redis is asked before the command is told to end.
func askTime(ttl time.Duration) time.Duration { return min(ttl/30, time.Second) }

// forwarded are the signals that are passed on to the command.
var forwarded = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2}

func runUnder(ctx context.Context, std streams, o *runOptions) (err error) {
	defer func() { // last of all
		var exit *exitStatus
		if errors.As(err, &exit) && exit.interrupted {
			dieOfInterrupt()
		}
	}()
	program, err := exec.LookPath(o.argv[0])
	if err != nil {
		return err // before the lock is taken
	}
	signals := make(chan os.Signal, 16)
	for _, s := range forwarded {
		if !signal.Ignored(s) { // by nohup, say, and then the command inherits that; Go tells of HUP and INT only
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)

	trouble := troubleLog{warnings: make(chan string, 1), failures: make(chan error, 1)}
	conn, err := o.connectUnless(ctx, signals, &trouble)
	if err != nil {
		return ofSignal(err)
	}
	defer conn.close() // the lease is unlocked before
	client := conn.client

	g, err := startGuard()
	if err != nil {
		return fmt.Errorf("cannot start the guard of the command: %w", err)
	}
	defer g.end()
	lease, err := o.acquire(ctx, std, conn, signals, &trouble)
	if err != nil {
		if left := client.Close(); left != nil { // which has tried for a while to withdraw the request
			complain(std, left)
		}
		return o.withoutLock(ctx, conn, err)
	}
	taken := time.Now()
	r := &running{options: o, lease: lease, guard: g, signals: signals, stderr: std.err, trouble: &trouble}
	err = r.perform(program)
	ends := time.Now().Add(o.ttl) // renewed just now at the latest
	if kept := taken.Add(o.atLeast); kept.After(time.Now()) {
		ends = latest(ends, kept.Add(min(o.ttl, time.Minute))) // which counts from when the release arrives
	}
	unlocked := lease.Unlock()
	switch {
	case r.lost != nil:
	case errors.Is(unlocked, leased.ErrLeaseLost):
		r.lost = unlocked
	case errors.Is(unlocked, leased.ErrNotReleased) && client.Close() == nil: // Close goes on trying for a while
	case errors.Is(unlocked, leased.ErrNotReleased):
		// The command has ended, so nobody is in danger.
		fmt.Fprintf(std.err, "leased: release of lock %q not confirmed by Redis: it stays taken until %s at most\n", o.name, instant(ends))
	case unlocked != nil:
		complain(std, unlocked) // likewise
	}
	if r.lost != nil {
		return &exitStatus{status: statusRunLost, err: r.lost}
	}
	return err
}

// withoutLock returns the error of a run that did not get the lock, and has withdrawn its request.
func (o *runOptions) withoutLock(ctx context.Context, conn *connection, err error) error {
	switch {
	case errors.As(err, new(caught)):
		return ofSignal(err)
	case errors.Is(err, leased.ErrInvalidName):
		return usagef("run: %s", bare(err))
	case errors.Is(err, context.DeadlineExceeded): // also if it matches ErrLocked, because Redis may hang by now
		again, failed := conn.again()
		if failed != nil {
			break
		}
		defer again.client.Close() // it holds nothing
		contended, why := o.contended(ctx, again, err)
		if contended {
			return &exitStatus{status: o.conflict}
		}
		if why != "" && !errors.Is(err, leased.ErrNoQuorum) {
			return fmt.Errorf("%w; %s", err, why)
		}
	case errors.Is(err, leased.ErrLocked):
		return &exitStatus{status: o.conflict}
	}
	return o.notAcquired(err)
}

// connect connects to Redis, and refuses a lock whose clients would not hear this one.
func (o *runOptions) connect(ctx context.Context, trouble *troubleLog) (*connection, error) {
	ctx, cancel := o.bounded(ctx, time.Second) // however short -w is, a slow connection is no failure
	defer cancel()
	conn, err := o.at.open(ctx, o.name, leased.WithTTL(o.ttl), leased.WithMinHold(o.atLeast), leased.WithLogger(slog.New(trouble)))
	if err != nil {
		return nil, err
	}
	if other := conn.alias(ctx, o.name); other != nil {
		conn.close()
		return nil, usagef("%s", other.says())
	}
	conn.replica = conn.onReplica(ctx)
	return conn, nil
}

// bounded returns a context that ends when -w says, but not before least has passed. With -n, that is
// least, or never if least is 0, because nothing waits then.
func (o *runOptions) bounded(ctx context.Context, least time.Duration) (context.Context, context.CancelFunc) {
	switch {
	case o.noWait && least > 0:
		return context.WithTimeout(ctx, least)
	case o.noWait || o.wait <= 0:
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, max(time.Duration(o.wait*float64(time.Second)), least))
}

// caught is the signal that ended the wait for the lock.
type caught syscall.Signal

func (s caught) Error() string { return syscall.Signal(s).String() }

// ofSignal returns the exit status for a signal that came before the command ran, or err if it is none.
func ofSignal(err error) error {
	var s caught
	if !errors.As(err, &s) {
		return err
	}
	return &exitStatus{status: 128 + int(s), interrupted: syscall.Signal(s) == syscall.SIGINT}
}

// dieOfInterrupt ends this process as Ctrl-C ends one that does not catch it. A script that is run by
// bash ends there too, but not if its command had only the status that shells give to such an end.
func dieOfInterrupt() {
	if os.Getpid() == 1 {
		return // in a container, where the system ignores the signal and the Go runtime then exits by itself
	}
	signal.Reset(syscall.SIGINT)
	_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
	time.Sleep(time.Second) // until the signal is here. If it is ignored, the status has to do.
}

// connectUnless is connect, but ends with the first signal.
func (o *runOptions) connectUnless(ctx context.Context, signals <-chan os.Signal, trouble *troubleLog) (*connection, error) {
	type result struct {
		conn *connection
		err  error
	}
	done := make(chan result, 1)
	// Owned by this call. After a signal nobody waits for it: the process ends, without what it may still
	// connect.
	go func() {
		conn, err := o.connect(ctx, trouble)
		done <- result{conn, err}
	}()
	select {
	case r := <-done:
		return r.conn, r.err
	case s := <-signals:
		return nil, caught(s.(syscall.Signal))
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// notAcquired says what to do about an answer of Redis that has an easy cause.
func (o *runOptions) notAcquired(err error) error {
	var answer redis.Error
	if errors.Is(err, leased.ErrNoQuorum) || !errors.As(err, &answer) {
		return err
	}
	if hintFor(answer).cause == "" {
		return err
	}
	return fmt.Errorf("cannot get lock %q from Redis: %w", o.name, inPlainWords(answer))
}

// maxChecks is how often a lease that was just acquired is renewed at most. If the TTL is short for the
// way to Redis, no renewal leaves much of it.
const maxChecks = 3

const checkAgain = 100 * time.Millisecond // after a check that failed

// acquire waits for the lock. The lease that it returns can be trusted for most of its TTL. If Redis
// does not give the lock for some time, acquire says so, once, and so it does if the lock may never
// become free. It does not wait for a replica.
func (o *runOptions) acquire(ctx context.Context, std streams, conn *connection, signals <-chan os.Signal, trouble *troubleLog) (*leased.Lease, error) {
	ctx, cancel := o.bounded(ctx, 0)
	defer cancel()
	client := conn.client
	lock := client.RWMutex(o.name)
	call := lock.LockContext
	switch {
	case o.noWait && o.shared:
		call = lock.TryRLockContext
	case o.noWait:
		call = lock.TryLockContext
	case o.shared:
		call = lock.RLockContext
	}
	type result struct {
		lease *leased.Lease
		err   error
	}
	done := make(chan result, 1)
	// This is ended by cancel, and waited for below.
	go func() {
		lease, err := o.lockAndCheck(ctx, call)
		done <- result{lease, err}
	}()
	look := time.NewTicker(time.Second)
	defer look.Stop()
	warnings := trouble.warnings
	if o.noWait {
		warnings = nil // it does not wait for whatever they tell of
	}
	for {
		select {
		case r := <-done:
			return r.lease, r.err
		case <-look.C:
			why := trouble.lasting()
			if why == nil {
				continue
			}
			if contended, _ := o.contended(ctx, conn, why); !contended {
				fmt.Fprintf(std.err, "leased: still waiting for lock %q; Redis is not granting it: %v\n", o.name, inPlainWords(why))
				look.Stop()
			}
		case text := <-warnings:
			fmt.Fprintf(std.err, "leased: still waiting for lock %q: %s\n", o.name, strings.TrimPrefix(text, "leased: "))
			warnings = nil
		case err := <-trouble.failures:
			if !conn.replica || !redisserver.Replied(err, "READONLY") {
				continue
			}
			cancel()
			r := <-done
			if r.err != nil {
				r.err = err
			}
			return r.lease, r.err
		case s := <-signals:
			cancel()
			if r := <-done; r.err == nil {
				_ = r.lease.Unlock() // unused; what Unlock cannot do, the TTL does
			}
			return nil, caught(s.(syscall.Signal))
		}
	}
}

// lockAndCheck makes a call for the lock, and checks its lease until it can be trusted for most of its TTL. In
// a Cluster, a lease that came by message is trusted for only two seconds until it is renewed, and the command
// must not be told to end because of that.
func (o *runOptions) lockAndCheck(ctx context.Context, call func(context.Context) (*leased.Lease, error)) (*leased.Lease, error) {
	lease, err := call(ctx)
	for checks := 0; err == nil && checks < maxChecks && time.Until(lease.TrustedUntil()) < o.ttl*2/3; checks++ {
		err = lease.Check(ctx)
		switch {
		case err == nil:
		case ctx.Err() != nil, o.noWait && !errors.Is(err, leased.ErrLeaseLost):
			_ = lease.Unlock() // the error of Check says why
		case errors.Is(err, leased.ErrLeaseLost):
			_ = lease.Unlock() // likewise
			checks = 0
			lease, err = call(ctx)
		default: // Redis has failed. The lease may still be ours, and to give it back would begin the rest of --at-least.
			checks, err = 0, nil
			pause(ctx, checkAgain)
		}
	}
	return lease, err
}

// running is a command that runs under a lease.
type running struct {
	options *runOptions
	lease   *leased.Lease
	guard   *guard
	signals <-chan os.Signal
	stderr  io.Writer
	trouble *troubleLog

	tty       *terminal        // nil if the command has none
	unstopped <-chan time.Time // nil unless the command was stopped; see stopped
	lost      error            // why the command was told to end, nil if it was not
	killAt    time.Time        // set with lost
	killed    time.Time        // when it was first killed; zero if it was not
	promised  time.Time        // what prolong last told the guard
	told      bool             // whether the user was told that the command cannot be killed
}

// perform starts the command, and returns when it has ended and nothing that it must not leave
// behind is still running.
func (r *running) perform(program string) error {
	o := r.options
	r.prolong()
	r.tty = openTerminal()
	r.tty.giveIfOurs(r.guard.pid)
	child, err := r.start(program)
	// From here on this process is in the background of its terminal. There it may not take the
	// foreground back unless it ignores this signal. A command that was started does not inherit that.
	signal.Ignore(syscall.SIGTTOU)
	defer signal.Reset(syscall.SIGTTOU)
	if err != nil {
		r.tty.takeBack(false)
		return err
	}
	resumed := make(chan os.Signal, 1)
	signal.Notify(resumed, syscall.SIGCONT)
	defer signal.Stop(resumed)

	changes := make(chan change)
	// This goroutine is owned by this call, and ends with the command, whose end is the last thing
	// that it sends.
	go func() {
		for {
			c := awaitChange(child.Pid)
			changes <- c
			if c.err != nil || !c.status.Stopped() {
				return
			}
		}
	}()
	tick := time.NewTicker(lookEvery(o.ttl))
	defer tick.Stop()
	over := r.lease.Context().Done()
	for {
		select {
		case <-over:
			over = nil
			r.tellToEnd(context.Cause(r.lease.Context()))
		case <-tick.C:
			r.watchLease()
		case s := <-r.signals:
			r.guard.signal(s.(syscall.Signal))
			if s != syscall.SIGUSR1 && s != syscall.SIGUSR2 {
				r.guard.signal(syscall.SIGCONT) // a stopped process does not hear it
			}
		case <-resumed:
			r.resume()
		case <-r.unstopped:
			r.goOn(resumed)
		case c := <-changes:
			if c.err == nil && c.status.Stopped() {
				r.stopped(c.status.StopSignal())
				continue
			}
			return r.ended(c)
		}
	}
}

// start starts the command. As execvp does, it has the shell run a script that does not name its
// interpreter.
func (r *running) start(program string) (*os.Process, error) {
	attr := &os.ProcAttr{
		Env:   r.environment(os.Environ()),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys:   &syscall.SysProcAttr{Setpgid: true, Pgid: r.guard.pid},
	}
	child, err := os.StartProcess(program, r.options.argv, attr)
	if errors.Is(err, syscall.ENOEXEC) {
		return os.StartProcess("/bin/sh", append([]string{"sh", program}, r.options.argv[1:]...), attr)
	}
	return child, err
}

// environment returns the command's environment. If this process runs under another "leased run", it has
// that one's variables, of which most programs would take the first.
func (r *running) environment(of []string) []string {
	const name, token = "LEASED_NAME=", "LEASED_TOKEN="
	own := slices.DeleteFunc(slices.Clone(of), func(v string) bool {
		return strings.HasPrefix(v, name) || strings.HasPrefix(v, token)
	})
	return append(own, name+r.options.name, token+strconv.FormatUint(r.lease.Token(), 10))
}

// change is a change of a child's state, or why the system does not tell it.
type change struct {
	status syscall.WaitStatus
	err    error
}

// awaitChange waits until the child stops or ends.
func awaitChange(child int) (c change) {
	for {
		_, c.err = syscall.Wait4(child, &c.status, syscall.WUNTRACED, nil)
		if !errors.Is(c.err, syscall.EINTR) {
			return c
		}
	}
}

// watchLease makes the command end in time if its lease is lost or about to end.
func (r *running) watchLease() {
	now, ttl := time.Now(), r.options.ttl
	until := r.lease.TrustedUntil()
	switch {
	case r.lost != nil:
		// Nobody asks Redis anymore, so the guard would wait in vain if the wall clock was set.
		if now.Before(r.killAt) && !r.guard.deadline.passedOnWall(readClocks()) {
			return
		}
		r.guard.signal(syscall.SIGKILL)
		if r.killed.IsZero() {
			r.killed = now
		}
		if now.Sub(r.killed) > time.Second && !r.told {
			r.told = true
			fmt.Fprintf(r.stderr, "leased: the command goes on although it was killed, perhaps because it runs as another user; "+
				"it may work beside the next owner of lock %q\n", r.options.name)
		}
	case r.guard.isDue():
		r.stoodStill()
	case until.Sub(now) < termMargin(ttl):
		// Renewals need not have failed: the wall clock may just have been set ahead, or the machine may have
		// slept. Only Redis knows whether the lease is still good.
		switch err := r.ask(); {
		case err == nil:
			r.prolong()
			return
		case errors.Is(err, leased.ErrLeaseLost):
			return // the context of the lease ends, with the reason
		}
		why := ""
		switch err := r.trouble.after(until.Add(-ttl)); { // since the last renewal
		case errors.Is(err, leased.ErrNoQuorum): // it joins the errors of all servers
			why = fmt.Sprint(": ", err)
		case err != nil:
			why = fmt.Sprint(": ", inPlainWords(err))
		}
		r.tellToEnd(fmt.Errorf("the lease of lock %q could not be renewed, and the command was told to end before the lease ends%s", r.options.name, why))
	default:
		r.prolong()
	}
}

// ask has the lease renewed, and returns nil if it was. This process does nothing else meanwhile, which is
// for askTime at most.
func (r *running) ask() error {
	ctx, cancel := context.WithTimeout(r.lease.Context(), askTime(r.options.ttl))
	defer cancel()
	return r.lease.Check(ctx)
}

// prolong tells the guard how long the lease lasts, if that has changed.
func (r *running) prolong() {
	until := r.lease.TrustedUntil().Add(-killMargin(r.options.ttl))
	if !until.Equal(r.promised) {
		r.promised = until
		r.guard.until(until)
	}
}

// stoodStill is called when the guard kills the command or has killed it, because this process stood still
// and did not tell it that the lease lasts.
func (r *running) stoodStill() {
	if r.lost != nil {
		return
	}
	r.killAt = time.Now()
	r.guard.signal(syscall.SIGKILL)
	r.lost = fmt.Errorf("the lease of lock %q was not renewed in time, and the command was killed before the lease could end", r.options.name)
}

func (r *running) tellToEnd(why error) {
	if r.lost != nil {
		return
	}
	r.lost = why
	now, ttl := time.Now(), r.options.ttl
	r.killAt = now.Add(termMargin(ttl) - killMargin(ttl))
	if end := r.lease.TrustedUntil().Add(-killMargin(ttl)); end.After(now) && end.Before(r.killAt) {
		r.killAt = end
	}
	if r.guard.deadline.passedOnWall(readClocks()) {
		r.killAt = now // the guard has only waited for what Redis says
	}
	r.guard.until(r.killAt)
	r.guard.signal(syscall.SIGTERM)
	r.guard.signal(syscall.SIGCONT)
}

// stopped handles a command that was stopped from its terminal: the shell that waits for this
// process has to get the terminal back. Every process in our own group is stopped, as if the
// terminal had done it. If the lease ends in the meantime, the guard kills the command.
//
// No shell need be there: ssh, a container or a terminal window may have started this process. Then the
// system does not stop it, and nothing would ever continue the command. So if this process goes on by
// itself, the command does, too.
func (r *running) stopped(by syscall.Signal) {
	wants := by == syscall.SIGTTIN || by == syscall.SIGTTOU
	switch {
	case by != syscall.SIGTSTP && !wants:
	case wants && r.tty.giveIfOurs(r.guard.pid): // the shell brought us to the foreground before it wanted the terminal
		r.guard.signal(syscall.SIGCONT)
	case r.tty != nil:
		r.tty.takeBack(false)
		_ = syscall.Kill(0, syscall.SIGTSTP) // cannot fail: it is our own group
		r.unstopped = time.After(stopGrace)
	case wants:
		r.reportStopped()
	}
}

func (r *running) reportStopped() {
	fmt.Fprintf(r.stderr, "leased: the command has stopped, because it wants the terminal, which it does not get in a pipeline or "+
		"in the background; lock %q stays taken until the command ends\n", r.options.name)
}

// goOn is called if this process may not have been stopped.
func (r *running) goOn(resumed <-chan os.Signal) {
	r.unstopped = nil
	select {
	case <-resumed: // it was
	default:
		if r.tty.foreground() != r.tty.own {
			r.reportStopped() // it would stop again
			return
		}
	}
	r.resume()
}

// stopGrace is how long this process goes on after a signal that stops it if no shell controls it.
const stopGrace = 250 * time.Millisecond

// resume continues a command that was stopped, in the foreground if this process is there.
func (r *running) resume() {
	r.unstopped = nil
	r.tty.giveIfOurs(r.guard.pid)
	r.guard.signal(syscall.SIGCONT)
}

// ended returns the status of the command. If there is none, the command may still run, and the lock
// is about to be given back.
func (r *running) ended(c change) error {
	status := c.status
	if r.lost != nil || c.err != nil {
		r.guard.signal(syscall.SIGKILL) // what the command started and did not end
	}
	fromTerminal := r.tty.takeBack(status.Signaled())
	r.guard.end()
	if status.Signaled() && status.Signal() == syscall.SIGKILL && r.guard.mayHaveKilled() {
		r.stoodStill()
	}
	switch {
	case c.err != nil:
		return fmt.Errorf("the command was killed, because its exit status could not be read: %w", c.err)
	case status.Signaled():
		interrupted := status.Signal() == syscall.SIGINT
		if fromTerminal && interrupted {
			// Without us, Ctrl-C would have reached the script that started us.
			_ = syscall.Kill(0, syscall.SIGINT)
		}
		return &exitStatus{status: 128 + int(status.Signal()), interrupted: interrupted}
	case status.ExitStatus() != 0:
		return &exitStatus{status: status.ExitStatus()}
	}
	return nil
}
