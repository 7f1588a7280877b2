package redistest

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestServerTakesArgumentsAndEndsWithItsTest(t *testing.T) {
	var in *Instance
	t.Run("use", func(t *testing.T) {
		in = Server(t, "--maxmemory", "7mb")
		rdb := in.Client()
		if got := rdb.ConfigGet(t.Context(), "maxmemory").Val()["maxmemory"]; got != "7340032" {
			t.Errorf("maxmemory is %q", got)
		}
		if got := rdb.ConfigGet(t.Context(), "save").Val()["save"]; got != "" {
			t.Errorf("save is %q: tests keep nothing on disk", got)
		}
	})
	if in == nil {
		t.SkipNow() // like the subtest, which has said why
	}
	if answers(in.Addr, in.Pid(), nil) {
		t.Error("the server outlived its test")
	}
	if err := in.running.cmd.Process.Signal(os.Kill); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("the server was not waited for: %v", err)
	}
}

func TestServerTellsWhyItDoesNotStart(t *testing.T) {
	need(t)
	_, err := Start("--no-such-option", "1")
	if !errors.Is(err, errEnded) || !strings.Contains(err.Error(), "no-such-option") {
		t.Errorf("got %v", err)
	}
}

func TestServerWithPasswordStarts(t *testing.T) {
	in := Server(t, "--requirepass", "secret")
	rdb := in.Client(func(o *redis.Options) { o.Password = "secret" })
	if err := rdb.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
}

func TestTakenPortIsToldFromOtherFailures(t *testing.T) {
	in := Server(t)
	rival := &Instance{Addr: in.Addr, program: in.program, args: in.args, dir: t.TempDir()}
	if err := rival.run(); !errors.Is(err, errPort) {
		t.Errorf("a second server on %s: %v", in.Addr, err)
	}
}

func TestRestartKeepsThePortAndNothingElse(t *testing.T) {
	in := Server(t)
	rdb := in.Client()
	ctx := t.Context()
	if err := rdb.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	before := in.Pid()
	in.Kill()
	in.Kill() // it may already be dead
	if answers(in.Addr, before, nil) {
		t.Error("answers after Kill")
	}
	in.Restart()
	if in.Pid() == before {
		t.Error("the pid did not change")
	}
	if n, err := rdb.Exists(ctx, "k").Result(); err != nil || n != 0 {
		t.Errorf("after Restart: %d keys, %v", n, err)
	}
	in.Restart() // it ends the server by itself
	if err := rdb.Ping(ctx).Err(); err != nil {
		t.Error(err)
	}
}

func TestStoppedServerKeepsConnectionsAndGoesOn(t *testing.T) {
	in := Server(t)
	rdb := in.Client(func(o *redis.Options) {
		o.ContextTimeoutEnabled = true
		o.MaxRetries = -1
	})
	if err := rdb.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	in.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := rdb.Ping(ctx).Err(); err == nil {
		t.Error("a frozen server answered")
	}
	in.Cont()
	if err := rdb.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	in.Stop() // the cleanup must end a frozen server, too
}

func TestSharedServerIsOneAndCannotBeBroken(t *testing.T) {
	a, b := Shared(t), Shared(t)
	if a.Pid() != b.Pid() {
		t.Error("two calls of Shared returned different servers")
	}
	s := &spy{TB: t, name: "spy"}
	view := Shared(t)
	view.tb = s
	view.Kill()
	view.Restart()
	view.Stop()
	if len(s.said) != 3 {
		t.Errorf("Kill, Restart and Stop of a shared server reported %q", s.said)
	}
	view.Close() // ends the view's clients only
	if err := a.Client().Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
}

func TestStartServesProgramsWithoutTests(t *testing.T) {
	need(t)
	in, err := Start()
	if err != nil {
		t.Fatal(err)
	}
	if err := in.Client().Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	in.Close()
	if _, err := os.Stat(in.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the server's directory stayed: %v", err)
	}
	if !strings.Contains(in.Log(), "Running mode=standalone") {
		t.Errorf("log: %s", in.Log())
	}
}
