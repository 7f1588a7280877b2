package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// sale is a number of servers, and the buyers who crowd them. Servers may be added and
// killed while buyers buy.
type sale struct {
	program string // what to start as a server
	options options
	before  func(*exec.Cmd) // may change how it is started; nil for nothing

	mu      sync.Mutex // guards servers
	servers []*process
}

// process is one server.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer // it ends with this
	url   string
}

// add starts a server and waits until it listens.
func (s *sale) add() error {
	o := s.options
	cmd := exec.Command(s.program, "-serve", "-redis", o.redis, "-database", o.database, "-recipe", o.recipe, //nolint:noctx // ended by end
		"-ttl", o.ttl.String(), "-think", o.think.String(), "-pause", o.pause)
	cmd.Stderr = os.Stderr
	if s.before != nil {
		s.before(cmd)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{cmd: cmd, stdin: stdin}
	s.mu.Lock()
	s.servers = append(s.servers, p)
	s.mu.Unlock()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		return fmt.Errorf("a server did not start: %w", err)
	}
	s.mu.Lock()
	p.url = strings.TrimSpace(line)
	s.mu.Unlock()
	return nil
}

// end ends all servers and waits for them.
func (s *sale) end() {
	s.mu.Lock()
	servers := s.servers
	s.servers = nil
	s.mu.Unlock()
	for _, p := range servers {
		_ = p.stdin.Close()
	}
	for _, p := range servers {
		late := time.AfterFunc(5*time.Second, func() { _ = p.cmd.Process.Kill() })
		_ = p.cmd.Wait() // one that was killed has no other way to end
		late.Stop()
	}
}

// kill ends the n-th server without warning.
func (s *sale) kill(n int) {
	s.mu.Lock()
	p := s.servers[n]
	s.servers = append(s.servers[:n:n], s.servers[n+1:]...)
	s.mu.Unlock()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// url returns the address of one of the servers.
func (s *sale) url(n int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.servers[n%len(s.servers)].url
}

// buyAll returns when each of n buyers has got a piece or heard that none is left.
func (s *sale) buyAll(ctx context.Context, n int) error {
	var next atomic.Int64
	var all sync.WaitGroup
	failed := make(chan error, buyers)
	for range buyers {
		all.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1))
				if i > n {
					return
				}
				if err := s.buyUntilAnswered(ctx, i); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	all.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return ctx.Err()
	}
}

// buyers is how many buy at a time.
const buyers = 12

// buyUntilAnswered is one buyer. It asks another server when one does not answer, for
// that one may have been killed, and under the same name, so that it gets one piece only.
func (s *sale) buyUntilAnswered(ctx context.Context, buyer int) error {
	for try := 0; ; try++ {
		status, err := buyOnce(ctx, s.url(buyer+try), "buyer-"+strconv.Itoa(buyer))
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("buyer %d was not answered: %w (last: %d, %w)", buyer, ctx.Err(), status, err)
		case status == http.StatusOK, status == http.StatusGone:
			return nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

var web = &http.Client{Timeout: 2 * time.Second} // a server may be stopped

func buyOnce(ctx context.Context, url, buyer string) (status int, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/buy?buyer="+buyer, nil)
	if err != nil {
		return 0, err
	}
	answer, err := web.Do(r)
	if err != nil {
		return 0, err
	}
	return answer.StatusCode, answer.Body.Close()
}
