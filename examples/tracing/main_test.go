package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// The test binary is started again as a process of the service, as main is.
func TestMain(m *testing.M) {
	quiet()
	if len(os.Args) > 1 && os.Args[1] == serveCommand {
		std := streams{os.Stdin, os.Stdout, os.Stderr}
		os.Exit(conclude(std, serve(context.Background(), std)))
	}
	os.Exit(m.Run())
}

// collector is an OTLP collector that counts what it gets.
func collector(t *testing.T) (address string, sent *atomic.Int64) {
	sent = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/v1/traces" {
			sent.Add(1)
		}
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://"), sent
}

// perform runs the program and returns what it printed.
func perform(t *testing.T, args ...string) string {
	t.Helper()
	var out, trouble bytes.Buffer
	if err := run(t.Context(), streams{out: &out, err: &trouble}, args); err != nil {
		t.Fatalf("%v\nprinted:\n%s\nand:\n%s", err, &out, &trouble)
	}
	if trouble.Len() > 0 {
		t.Errorf("the services complain:\n%s", &trouble)
	}
	return out.String()
}

func TestThreeProcessesSellUnderTheLockAndAreGoneAfterwards(t *testing.T) {
	address, sent := collector(t)
	out := perform(t, "--otlp", address, "--orders", "9", "--stock", "5", "--think", "1ms")
	if want := `9 orders from 6 customers: 5 accepted, 4 told "sold out". 0 of 5 are left.`; !strings.Contains(out, want) {
		t.Errorf("the output lacks %q:\n%s", want, out)
	}
	if n := sent.Load(); n < processes {
		t.Errorf("the collector got %d messages of spans, want at least one of each of %d processes", n, processes)
	}
	gone(t, out)
}

// gone checks that the processes which the output names have ended.
func gone(t *testing.T, out string) {
	t.Helper()
	started := regexp.MustCompile(`process (\d+)`).FindAllStringSubmatch(out, -1)
	if len(started) != processes {
		t.Fatalf("the output names %d processes, want %d:\n%s", len(started), processes, out)
	}
	for _, m := range started {
		pid, _ := strconv.Atoi(m[1])
		if p, err := os.FindProcess(pid); err == nil && p.Signal(syscall.Signal(0)) == nil {
			t.Errorf("process %d is still there", pid)
		}
	}
}

func TestServicesEndAlsoWhenTheRunIsInterrupted(t *testing.T) {
	address, _ := collector(t)
	ctx, cancel := context.WithCancel(t.Context())
	out := &tripwire{at: "orders-3 ", trip: cancel} // the last process serves
	err := run(ctx, streams{out: out, err: io.Discard}, []string{"--otlp", address, "--think", "1s"})
	if !errors.Is(err, errInterrupted) {
		t.Fatalf("got %v, want %v; printed:\n%s", err, errInterrupted, out)
	}
	gone(t, out.String())
}

// tripwire calls trip when a text was written.
type tripwire struct {
	bytes.Buffer
	at   string
	trip func()
}

func (w *tripwire) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if strings.Contains(w.String(), w.at) {
		w.trip()
	}
	return n, err
}

func TestMistakesAreToldWithWhatToDo(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--orders 1", "from 2 to 1000"},
		{"--think 2s", "from 0s to 1s"},
		{"--stock -1", "from 0 to 1000"},
		{"--jaeger http://localhost:16686", "needs --otlp"},
		{"--otlp localhost:4318 --keep", "there is none"},
		{"--otlp localhost:4318 --save x", "--jaeger"},
		{"--otlp localhost:4318 --redis http://x", "not a Redis URL"},
		{"--nonsense", "nonsense"},
		{"now", `"now"`},
	} {
		var mistake *usageError
		err := run(t.Context(), streams{out: io.Discard, err: io.Discard}, strings.Fields(c.args))
		if !errors.As(err, &mistake) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want a mistake that says %q", c.args, err, c.want)
		}
	}
	if help := perform(t, "--help"); !strings.Contains(help, "-keep") || !strings.Contains(help, "loopback") {
		t.Errorf("--help prints:\n%s", help)
	}
}

// People with Docker see what the test saw.
func TestComposeHasTheJaegerThatIsTested(t *testing.T) {
	mod := readText(t, filepath.Join(jaegerModule, "go.mod"))
	version := regexp.MustCompile(`github.com/jaegertracing/jaeger v([0-9.]+)`).FindStringSubmatch(mod)
	if version == nil {
		t.Fatal("the module that builds Jaeger does not say which")
	}
	if image := "jaegertracing/all-in-one:" + version[1]; !strings.Contains(readText(t, "compose.yaml"), image) {
		t.Errorf("compose.yaml does not have %s", image)
	}
}

func readText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
