//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/leasedmutex/leased/internal/redistest"
)

// console is a terminal with a process of its own session in it.
type console struct {
	t    *testing.T
	pty  *os.File
	seen *shared
	cmd  *exec.Cmd
	over chan struct{}
}

func onConsole(t *testing.T, size *pty.Winsize, cmd *exec.Cmd) *console {
	t.Helper()
	file, err := pty.StartWithSize(cmd, size)
	if err != nil {
		t.Fatal(err)
	}
	c := &console{t: t, pty: file, seen: &shared{}, cmd: cmd, over: make(chan struct{})}
	// Ended by the end of the terminal's last process, waited for in the cleanup.
	go func() {
		defer close(c.over)
		buf := make([]byte, 4096)
		for {
			n, err := file.Read(buf)
			c.seen.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		file.Close()
		<-c.over
	})
	return c
}

func (c *console) types(text string) {
	c.t.Helper()
	if _, err := c.pty.WriteString(text); err != nil {
		c.t.Fatal(err)
	}
}

func (c *console) awaits(text string) {
	c.t.Helper()
	eventually(c.t, fmt.Sprintf("%q on the terminal, which shows %q", text, c.seen.String()), func() bool { return strings.Contains(c.seen.String(), text) })
}

func TestListsAreTidyAtAnyWidth(t *testing.T) {
	m := redistest.MiniTCP(t)
	rdb := redistest.MiniClient(t, m)
	t.Parallel()
	take(t, rdb, "", "a", "a-name-that-is-rather-long-for-a-lock-and-still-allowed", "with space", "über")
	for _, width := range []int{40, 80, 200} {
		for _, line := range []string{"ls", "top --count 1", "help", "help run", "help ls", "inspect a", "doctor", "demo --workers 2 --buyers 2 --stock 2", "demo --fence --stock 2", "demo --quorum --stock 3"} {
			args := strings.Fields(line)
			switch args[0] {
			case "demo":
				if width != 40 {
					continue // they give people time to read
				}
			case "help":
			default:
				args = append(args, "--redis", m.Addr())
			}
			t.Run(fmt.Sprint(width, " ", line), func(t *testing.T) {
				t.Parallel()
				tidy(t, width, args)
			})
		}
	}
}

func tidy(t *testing.T, width int, args []string) {
	cmd := program(t, args...)
	cmd.Env = append(cmd.Env, "NO_COLOR=1", "TERM=xterm")
	c := onConsole(t, &pty.Winsize{Rows: 50, Cols: uint16(width)}, cmd)
	cmd.Wait()
	<-c.over
	for text := range strings.SplitSeq(strings.ReplaceAll(c.seen.String(), "\x1b[H\x1b[2J", ""), "\r\n") {
		for shown := range strings.SplitSeq(text, "\r") { // a line of progress is rewritten
			if columns(shown) > width {
				t.Errorf("%d columns: %q", columns(shown), shown)
			}
		}
		if strings.Contains(text, "\x1b") {
			t.Errorf("with NO_COLOR: %q", text)
		}
		if !strings.Contains(text, "\r") && strings.TrimRight(text, " ") != text {
			t.Errorf("spaces at the end of %q", text)
		}
	}
}

func TestUnlockAsksOnATerminal(t *testing.T) {
	m := redistest.MiniTCP(t)
	for _, c := range []struct {
		answer string
		free   bool
	}{{"n\n", false}, {"\n", false}, {"yes\n", true}} {
		m.Set("job", "mine")
		console := onConsole(t, &pty.Winsize{Rows: 24, Cols: 80}, program(t, "unlock", "--force", "job", "--redis", m.Addr()))
		console.awaits("[y/N]")
		console.types(c.answer)
		console.cmd.Wait()
		if m.Exists("job") == c.free {
			t.Errorf("after the answer %q: %s", c.answer, console.seen.String())
		}
	}
	m.Set("job", "mine")
	console := onConsole(t, &pty.Winsize{Rows: 24, Cols: 80}, program(t, "unlock", "--force", "job", "--redis", m.Addr()))
	console.awaits("[y/N]")
	m.Set("job", "another's")
	console.types("y\n")
	console.awaits("the lock has another owner now")
	if !m.Exists("job") {
		t.Errorf("who came while the question was open was evicted: %s", console.seen.String())
	}
	eventually(t, "it asks again", func() bool { return strings.Count(console.seen.String(), "[y/N]") == 2 })
	m.Del("job")
	console.types("y\n")
	console.awaits("is free")
	if console.cmd.Wait(); console.cmd.ProcessState.ExitCode() != 0 {
		t.Errorf("status %d: %s", console.cmd.ProcessState.ExitCode(), console.seen.String())
	}
	if got := invoke(t, "unlock", "--force", "--yes", "job", "--redis", m.Addr()); got.status != 0 || got.out != "\"job\" is free.\n" {
		t.Errorf("of a free lock: %+v", got)
	}
}
