package main

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
)

// child is this program, started once more with a role of its own. It speaks JSON and ends when
// its input ends.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

// startChild starts a child. The environment variable gives its role, in JSON.
func startChild(variable string, role any, env ...string) (*child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(role)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program)
	cmd.Env = append(append(os.Environ(), variable+"="+string(text)), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &child{cmd, in, json.NewDecoder(bufio.NewReader(out))}, nil
}

func (c *child) end() {
	_ = c.in.Close()
	_ = c.cmd.Wait()
}
