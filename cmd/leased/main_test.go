package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/leasedmutex/leased/internal/redistest"
)

// asCommand in the environment makes the test program the command itself.
const asCommand = "LEASED_TEST_AS_COMMAND=1"

func TestMain(m *testing.M) {
	name, value, _ := strings.Cut(asCommand, "=")
	if os.Getenv(name) == value || len(os.Args) > 1 && os.Args[1] == workerCommand {
		main()
	}
	quietRedis()
	os.Exit(redistest.Main(m))
}

// program is the command as a process of its own.
func program(tb testing.TB, args ...string) *exec.Cmd {
	tb.Helper()
	self, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.CommandContext(tb.Context(), self, args...)
	cmd.Env = append(os.Environ(), asCommand)
	return cmd
}

// result is what a run of the command left.
type result struct {
	status   int
	out, err string
}

// invoke runs a command line inside the test.
func invoke(tb testing.TB, args ...string) result {
	tb.Helper()
	var out, err shared
	status := run(tb.Context(), streams{strings.NewReader(""), &out, &err}, args)
	return result{status, out.String(), err.String()}
}

// shared is a buffer that several processes' output is copied to.
type shared struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(p)
}

func (s *shared) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

func TestMistakesInTheCommandLineAreToldWithStatusTwo(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"sell", `no command "sell"`},
		{"help sell", `no command "sell"`},
		{"help demo inspect", "one command"},
		{"version 1", "no arguments"},
		{"inspekt", `is it "inspect"?`},
		{"demo --workers 0", "--workers must be from 1 to 50, not 0"},
		{"demo --workers 51", "--workers must be from 1 to 50, not 51"},
		{"demo --buyers 201", "--buyers must be from 1 to 200, not 201"},
		{"demo --stock -3", "--stock must be from 1 to 1000, not -3"},
		{"demo --stock many", "many"},
		{"demo --ttl 99ms", "--ttl must be"},
		{"demo --ttl 100500us", "--ttl must be"},
		{"demo --ttl 2m", "--ttl must be"},
		{"demo --kill --workers 1", "--kill needs --workers 2"},
		{"demo --colour", "colour"},
		{"demo now", `"now"`},
		{"doctor redis://:hush@h:1", "--redis"},
		{"redis://:hush@h:1", "--redis"},
		{"help redis://:hush@h:1", "--redis"},
		{"inspect a -redis=redis://:hush@h:1", "--redis"},
		{"ls --limit redis://:hush@h:1", "--redis"},
		{"completion redis://:hush@h:1", "--redis"},
		{"inspect a --quorum=redis://:hush@h:1", "--quorum takes no value"},
		{"demo --redis http://localhost", "--redis is not a Redis URL"},
		{"inspect", "the name of one lock"},
		{"inspect a b", "the name of one lock"},
		{"inspect a --redis localhost:6379:1", "neither a Redis URL"},
		{"inspect a --redis a:1,b:2", "--cluster, --sentinel NAME or --quorum"},
		{"inspect a --redis a:1 --redis b:2", "--cluster, --sentinel NAME or --quorum"},
		{"inspect a --redis redis://a:1 --redis redis://b:2", "--cluster, --sentinel NAME or --quorum"},
		{"inspect a --redis a:1 --redis redis://b:2?master_name=x", "--cluster, --sentinel NAME or --quorum"},
		{"ls --redis a:1 --redis b:2", "--cluster, --sentinel NAME or --quorum"},
		{"demo --redis a:1 --redis b:2", "--cluster, --sentinel NAME or --quorum"},
		{"inspect a --cluster --redis redis://a:1 --redis redis://b:2", "--redis takes one URL"},
		{"inspect a --sentinel x --redis a:1 --redis redis://b:2", "--redis takes one URL"},
		{"inspect a --cluster --sentinel x", "exclude each other"},
		{"inspect a --cacert /nowhere", "--cacert"},
		{"inspect a --cert x", "--cert needs --key"},
		{"ls --key x", "--key needs --cert"},
		{"demo --cert x", "--cert needs --key"},
		{"inspect a --watch --interval 1ms", "--interval"},
		{"ls a b", "one pattern"},
		{"ls --limit 0", "--limit"},
		{"demo --ttl 30", `--ttl takes a duration such as 30s, not "30"`},
		{"ls --limit ten", `--limit takes a whole number, not "ten"`},
		{"completion tcsh", `bash, zsh, fish and powershell, not for "tcsh"`},
		{"completion bash now", `"now"`},
		{"unlock a", "--force"},
		{"unlock --force a", "--yes"},
	} {
		got := invoke(t, strings.Fields(c.line)...)
		if got.status != 2 || !strings.Contains(got.err, c.want) || got.out != "" || strings.Contains(got.err, "hush") {
			t.Errorf("leased %s: status %d, stdout %q, stderr %q; want status 2 and %q on stderr", c.line, got.status, got.out, got.err, c.want)
		}
	}
}

// A flag that is given again must not silently take the place of the first one.
func TestAllAddressesThatAreGivenAreUsed(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"--redis a:1", "a:1"},
		{"--redis a:1 --redis a:1", "a:1"},
		{"--redis= --redis a:1", "a:1"},
		{"--redis redis://:p,w@a:1", "a:1"},
		{"--redis a:1 --redis b:2,c --cluster", "a:1,b:2,c:6379"},
		{"--sentinel x --redis a --redis b:2", `"x" of the sentinels a:26379,b:2`},
	} {
		var at address
		command := &cobra.Command{}
		at.bind(command)
		if err := command.ParseFlags(strings.Fields(c.line)); err != nil {
			t.Fatal(err)
		}
		if o, err := at.options(); err != nil || where(o) != c.want {
			t.Errorf("%s: %+v, %v; want %s", c.line, o, err, c.want)
		}
	}
}

// The primary has a certificate of its own, which is not in the name of a sentinel.
func TestNoCertificateIsExpectedInTheNameOfASentinel(t *testing.T) {
	for _, c := range []struct {
		at   address
		name string
	}{
		{address{Redis: "a:1", TLS: true}, "a"},
		{address{Redis: "rediss://a:1"}, "a"},
		{address{Redis: "a:1", TLS: true, Sentinel: "main"}, ""},
		{address{Redis: "rediss://a:1", Sentinel: "main"}, ""},
		{address{Redis: "rediss://a:1?master_name=main&addr=b:2"}, ""},
	} {
		if o, err := c.at.options(); err != nil || o.TLSConfig.ServerName != c.name {
			t.Errorf("%+v: %v; the certificate has to be that of %q, not %q", c.at, err, o.TLSConfig.ServerName, c.name)
		}
	}
}

func TestHelpGoesToStandardOutputAndIsNoMistake(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"", "\n  inspect "},
		{"help", "\n  inspect "},
		{"--help", "\n  inspect "},
		{"-h", "\n  inspect "},
		{"help demo", "--kill"},
		{"demo --help", "--kill"},
		{"demo --workers 3 -h", "--kill"},
		{"inspect --help", "--redis ADDRESS"},
		{"help inspect", "--redis ADDRESS"},
		{"help help", "Explains a command"},
		{"version", "leased "},
		{"--version", "leased "},
		{"completion bash", "leased"},
		{"completion", "powershell"},
	} {
		got := invoke(t, strings.Fields(c.line)...)
		if got.status != 0 || !strings.Contains(got.out, c.want) || got.err != "" {
			t.Errorf("leased %s: status %d, stdout %q, stderr %q; want status 0 and %q on stdout", c.line, got.status, got.out, got.err, c.want)
		}
		if strings.Contains(got.out, workerCommand) {
			t.Errorf("leased %s tells of %s, which is not for people", c.line, workerCommand)
		}
	}
}

func TestOutputThatCannotBeWrittenIsAFailure(t *testing.T) {
	const full = "/dev/full"
	if _, err := os.Stat(full); err != nil {
		t.Skipf("%v; run it on Linux", err)
	}
	in := redistest.Server(t)
	t.Setenv("LEASED_REDIS", in.Addr)
	if err := in.Client().Set(t.Context(), "a:{a}:meta", "1", 0).Err(); err != nil { // for ls
		t.Fatal(err)
	}
	for _, c := range []struct {
		line   string
		status int
	}{
		{"ls --all", 1},
		{"inspect x", 1},
		{"inspect x --json", 1},
		{"inspect x --watch", 1},
		{"top", 1},
		{"doctor", 1},
		{"help", 1},
		{"version", 1},
		{"man", 1},
		{"completion bash", 1},
		{"run --help", 69},
	} {
		out, err := os.OpenFile(full, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		var errs shared
		status := run(t.Context(), streams{strings.NewReader(""), out, &errs}, strings.Fields(c.line))
		out.Close()
		if status != c.status || !strings.HasPrefix(errs.String(), "leased: cannot write the output: ") || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("leased %s: status %d, stderr %q", c.line, status, errs.String())
		}
	}
}

func TestAServerThatIsNotThereIsNamedWithoutItsPassword(t *testing.T) {
	port, err := redistest.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	address := "127.0.0.1:" + strconv.Itoa(port)
	for _, args := range [][]string{{"demo"}, {"inspect", "a"}} {
		got := invoke(t, append(args, "--redis", "redis://:hush@"+address)...)
		if got.status != 1 || !strings.Contains(got.err, "no Redis at "+address) {
			t.Errorf("leased %v: status %d, stderr %q", args, got.status, got.err)
		}
		if strings.Contains(got.err+got.out, "hush") {
			t.Errorf("leased %v shows the password: %+v", args, got)
		}
		for _, malformed := range []string{"redis://:hush@:x:y", "redis://app:hush/x@" + address, "redis://app:hush?x@" + address, "redis://app:hush#x@" + address, "redis://app:hush%x@" + address, "redis://app:/hush@" + address, "redis://:?hush@" + address, "redis://app:12/hush@" + address, "redis://app:12#hush@" + address, "redis://app:s3@cr/hush@" + address, "redis://app:p@ss?hush@" + address, "redis://app:p@ss/w/hush@" + address, "redis://app:p@ss#hush@" + address} {
			bad := invoke(t, append(args, "--redis", malformed)...)
			if bad.status != 2 || !strings.Contains(bad.err, "percent-encoded") || strings.Contains(bad.err+bad.out, "hush") {
				t.Errorf("leased %v with %s: %+v", args, malformed, bad)
			}
		}
	}
}

func TestAnInterruptedCommandSaysSo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, err shared
	status := run(ctx, streams{strings.NewReader(""), &out, &err}, []string{"demo"})
	if status != 130 || err.String() != "leased: stopped\n" {
		t.Fatalf("status %d, stderr %q", status, err.String())
	}
}

func TestHelpShowsWhatACommandTakes(t *testing.T) {
	for _, c := range []struct {
		commands string
		quorum   bool
	}{{"run inspect unlock", true}, {"ls top doctor bench", false}} {
		for command := range strings.FieldsSeq(c.commands) {
			if got := invoke(t, "help", command); strings.Contains(got.out, "--quorum") != c.quorum {
				t.Errorf("help %s tells of --quorum: %v", command, !c.quorum)
			}
		}
	}
	for _, c := range newRoot(discard()).Commands() {
		c.InitDefaultHelpFlag()
		c.Flags().VisitAll(func(f *pflag.Flag) {
			switch isZero := strings.Trim(f.DefValue, "0s") == ""; {
			case f.Value.Type() == "bool" || f.DefValue == "-1":
				if strings.Contains(usageOf(f), "default") {
					t.Errorf("%s --%s tells of a default: %s", c.Name(), f.Name, usageOf(f))
				}
			case !isZero && strings.Count(usageOf(f), "(default "+f.DefValue+")") != 1:
				t.Errorf("%s --%s does not tell its default %s once: %s", c.Name(), f.Name, f.DefValue, usageOf(f))
			}
		})
	}
}

// Those of cobra come with texts of another form.
func TestHelpOfEachCommandHasTheSameForm(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden {
			return
		}
		help := invoke(t, append(strings.Fields(c.CommandPath())[1:], "--help")...)
		if help.status != 0 || strings.Contains(help.out, "\n\n\n") || c.Long == "" {
			t.Errorf("the help of %s: %+v", c.CommandPath(), help)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(discard()))
}

// discard is for tests that look at nothing printed.
func discard() streams { return streams{strings.NewReader(""), io.Discard, io.Discard} }

var eventually = redistest.Eventually
