//go:build unix

package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// Stop freezes the server: its connections stay open and nothing answers. Where /proc
// exists, the server is frozen when Stop returns; elsewhere it is an instant later.
func (in *Instance) Stop() {
	in.helper()
	if !in.signal(syscall.SIGSTOP) {
		return
	}
	// No event tells us. The wait is bounded: a program cannot ignore SIGSTOP, but it may be scheduled
	// late.
	for until := time.Now().Add(15 * time.Second); !frozen(in.Pid()); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			in.fail(errors.New("redistest: the server goes on after SIGSTOP"))
			return
		}
	}
}

// Cont lets a frozen server continue where it was.
func (in *Instance) Cont() {
	in.helper()
	in.signal(syscall.SIGCONT)
}

func (in *Instance) signal(s syscall.Signal) bool {
	in.helper()
	if in.refuseShared("signal") {
		return false
	}
	in.mu.Lock()
	p := in.running
	in.mu.Unlock()
	if err := p.cmd.Process.Signal(s); err != nil {
		in.fail(fmt.Errorf("redistest: %v to the server: %w", s, err))
		return false
	}
	return true
}

// frozen also returns true where it cannot know, so that nobody waits in vain.
func frozen(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	// The state follows the name, which is in parentheses and may itself contain some.
	after := stat[bytes.LastIndexByte(stat, ')')+1:]
	return bytes.HasPrefix(bytes.TrimSpace(after), []byte("T"))
}

func (p *process) thaw() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }
