package program

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test's own program is started again, and told by a variable what to do.
const variable = "LEASED_PROGRAM_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(variable) {
	case "end":
		os.Exit(0)
	case "read": // until the end of the input
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	case "parent": // starts another one, and is killed
		cmd, _ := again("read")
		cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
		if _, err := Start(cmd, syscall.SIGKILL); err != nil {
			panic(err)
		}
		_, _ = os.Stdout.WriteString(strconv.Itoa(cmd.Process.Pid) + "\n")
		select {}
	}
	os.Exit(m.Run())
}

func again(what string) (*exec.Cmd, error) {
	self, err := os.Executable()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), variable+"="+what)
	return cmd, err
}

func TestTheEndOfAProgramIsTold(t *testing.T) {
	cmd, err := again("end")
	if err != nil {
		t.Fatal(err)
	}
	ended, err := Start(cmd, syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
	<-ended
	if cmd.ProcessState == nil || !cmd.ProcessState.Success() {
		t.Errorf("it was not waited for: %v", cmd.ProcessState)
	}
}

func TestAProgramThatDoesNotStartIsAnError(t *testing.T) {
	ended, err := Start(exec.Command("/no/such/program"), syscall.SIGKILL)
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v, want %v", err, os.ErrNotExist)
	}
	<-ended
}

func TestAProgramEndsWithTheProcessThatStartedIt(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has this")
	}
	cmd, err := again("parent")
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe() // so that the program's input does not end
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	text := make([]byte, 32)
	n, err := out.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := strconv.Atoi(strings.TrimSpace(string(text[:n]))); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The program has the same output, which ends only when both are gone.
	if err := out.(*os.File).SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := out.Read(text); n != 0 || err != io.EOF {
		t.Errorf("read %q, %v", text[:n], err)
	}
	_ = cmd.Wait() // it was killed
}
