package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
)

// A child is this program, started once more. It reads lines that say what to do, and
// answers each with a line. Instants are passed as wall time, which the processes of a
// machine share; nobody is expected to set the clock meanwhile, and the quantiles hide a
// single figure that is wrong because of it.
const (
	roleVariable = "LEASED_MEASURE_ROLE"
	addrVariable = "LEASED_MEASURE_ADDR"
)

type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func spawn(role, addr string) (*child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), roleVariable+"="+role, addrVariable+"="+addr)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &child{cmd, in, bufio.NewScanner(out)}, cmd.Start()
}

// hear returns the fields of the child's next line.
func (c *child) hear() ([]string, error) {
	if !c.out.Scan() {
		return nil, errors.Join(errors.New("the child ended"), c.out.Err())
	}
	fields := strings.Fields(c.out.Text())
	if len(fields) == 0 || fields[0] == "failed" {
		return nil, fmt.Errorf("child: %s", c.out.Text())
	}
	return fields, nil
}

func (c *child) tell(format string, args ...any) error {
	_, err := fmt.Fprintf(c.in, format+"\n", args...)
	return err
}

// instant is the time that the child's next line begins with.
func (c *child) instant() (time.Time, error) {
	fields, err := c.hear()
	if err != nil {
		return time.Time{}, err
	}
	ns, err := strconv.ParseInt(fields[0], 10, 64)
	return time.Unix(0, ns), err
}

func (c *child) end() {
	_ = c.in.Close()
	_ = c.cmd.Wait()
}

// kill ends the child the hard way: SIGKILL.
func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

func play(role string) error {
	rdb := redis.NewClient(redistest.Options(os.Getenv(addrVariable)))
	defer rdb.Close()
	commands := bufio.NewScanner(os.Stdin)
	switch role {
	case "waiters":
		return playWaiters(rdb, commands)
	case "standing":
		var name string
		var n int
		if commands.Scan() {
			if _, err := fmt.Sscan(commands.Text(), &name, &n); err != nil {
				return err
			}
		}
		return playStanding(rdb, name, n)
	case "owner":
		c, err := leased.New(rdb, leased.WithLogger(quiet), leased.WithTTL(killedTTL))
		if err != nil {
			return err
		}
		if _, err := c.Mutex("x").LockContext(context.Background()); err != nil {
			return err
		}
		fmt.Println("locked")
		commands.Scan() // until killed
		return nil
	}
	return fmt.Errorf("no such role: %s", role)
}

// playWaiters answers
//
//	hear          with the time at which the next raw message came
//	queue k n     with the time at which the first of n clients got lock k, when
//	              all n have had it
func playWaiters(rdb *redis.Client, commands *bufio.Scanner) error {
	ctx := context.Background()
	sub := rdb.Subscribe(ctx, rawChannel)
	defer sub.Close()
	if _, err := sub.Receive(ctx); err != nil {
		return err
	}
	var clients []*leased.Client
	defer func() {
		for _, c := range clients {
			_ = c.Close() // a lock that a child leaves behind ends with its TTL
		}
	}()
	fmt.Println("ready")
	for commands.Scan() {
		var word, name string
		var n int
		if _, err := fmt.Sscan(commands.Text(), &word, &name, &n); err != nil {
			return err
		}
		if word == "hear" {
			if _, err := sub.ReceiveMessage(ctx); err != nil {
				return err
			}
			fmt.Println(time.Now().UnixNano())
			continue
		}
		for len(clients) < n {
			c, err := leased.New(rdb, leased.WithLogger(quiet))
			if err != nil {
				return err
			}
			clients = append(clients, c)
		}
		at, err := queue(ctx, clients[:n], name)
		if err != nil {
			return err
		}
		fmt.Println(at.UnixNano())
	}
	return nil
}

// queue has all clients lock and unlock once, and returns when the first one got the lock.
func queue(ctx context.Context, clients []*leased.Client, name string) (time.Time, error) {
	at := make([]time.Time, len(clients))
	errs := make([]error, len(clients))
	var all sync.WaitGroup
	for i, c := range clients {
		all.Go(func() {
			l, err := c.Mutex(name).LockContext(ctx)
			at[i] = time.Now()
			if err != nil {
				errs[i] = err
				return
			}
			errs[i] = l.Unlock()
		})
	}
	all.Wait()
	first := at[0]
	for _, t := range at {
		if t.Before(first) {
			first = t
		}
	}
	return first, errors.Join(errs...)
}
