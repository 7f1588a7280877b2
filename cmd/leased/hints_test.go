package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// refusal is an error that Redis replies.
type refusal string

func (r refusal) Error() string { return string(r) }
func (refusal) RedisError()     {}

// The name of a lock is in the texts of its errors, and may be like what Redis says.
func TestTheNameOfALockIsNotTakenForAnAnswer(t *testing.T) {
	m := redistest.MiniTCP(t)
	names := []string{"deploy:READONLY", "no broken pipe", "context deadline exceeded", "i/o timeout"}
	for _, h := range hints {
		names = append(names, h.mark+"house")
	}
	for _, name := range names {
		if _, err := m.Push(name, "a list"); err != nil {
			t.Fatal(err)
		}
		for line, text := range map[string]string{"inspect": "leased: inspecting lock %q: the lock's", "unlock --force --yes": "leased: unlocking lock %q by force: the lock's"} {
			got := invoke(t, append(strings.Fields(line), name, "--redis", m.Addr())...)
			if want := fmt.Sprintf(text, name); got.status != 1 || !strings.HasPrefix(got.err, want) {
				t.Errorf("%s: status %d, stderr %q, want %q", line, got.status, got.err, want)
			}
		}
	}
}

// A lock may be called MISCONF, and Redis repeats its name.
func TestWhatRedisRepeatsIsNotTakenForAnAnswer(t *testing.T) {
	for text, want := range map[refusal]hint{
		"ERR unknown command 'evalsha', with args beginning with: '5f' '1' 'MOVED house' ": {},
		"NOPERM User u has no permissions to access the 'MISCONF' key":                     hintFor(refusal("NOPERM")),
		"ERR ACL failure in script: User u has no permissions to access the 'MISCONF' key": hintFor(refusal("ACL failure in script")),
	} {
		if got := hintFor(text); got.cause != want.cause || got.advice != want.advice {
			t.Errorf("%q is explained by %+v, not %+v", text, got, want)
		}
	}
}

func TestEachCauseIsToldHoweverItsErrorIsWrapped(t *testing.T) {
	onNetwork := func(op string, err error) error { return &net.OpError{Op: op, Err: err} }
	type of struct {
		err  error
		want hint
	}
	causes := []of{
		{onNetwork("write", os.NewSyscallError("write", syscall.EPIPE)), closedByServer},
		{onNetwork("read", os.ErrDeadlineExceeded), noAnswerInTime},
		{onNetwork("dial", errors.New("dial tcp 192.0.2.1:6379: i/o timeout")), noAnswerInTime}, // from the library, as the next one
		{onNetwork("dial", errors.New("context deadline exceeded")), noAnswerInTime},
		{context.DeadlineExceeded, noAnswerInTime},
		{context.Canceled, hint{}},
		{onNetwork("dial", syscall.ECONNREFUSED), hint{}},
	}
	for _, h := range hints {
		causes = append(causes, of{refusal("ERR Error running script: " + h.mark), h})
	}
	for _, c := range causes {
		for _, err := range []error{
			c.err,
			fmt.Errorf("leased: inspecting lock %q: %w", "job", c.err),
			fmt.Errorf("no Sentinel: %w", errors.Join(redis.Nil, onNetwork("dial", syscall.ECONNREFUSED), c.err)),
		} {
			if got := hintFor(err); got != c.want {
				t.Errorf("%q: %+v, want %+v", err, got, c.want)
			}
		}
	}
	if h := hintFor(errors.Join(context.DeadlineExceeded, refusal("NOAUTH Authentication required."))); h.mark != "NOAUTH" {
		t.Errorf("an answer counts for less than the silence of another server: %+v", h)
	}
}

// Redis quotes an unknown command with an apostrophe since 7.0, and with backquotes before.
func TestARedisThatIsNoSentinelIsCalledSo(t *testing.T) {
	for _, text := range []string{
		"ERR unknown command 'sentinel', with args beginning with: 'get-master-addr-by-name' 'mymaster' ",
		"ERR unknown command `sentinel`, with args beginning with: `get-master-addr-by-name`, `mymaster`, ",
	} {
		err := inPlainWords(fmt.Errorf("redis: all sentinels specified in configuration are unreachable: %w", errors.Join(redis.Nil, refusal(text))))
		if !strings.Contains(err.Error(), "leave out --sentinel") {
			t.Errorf("%q is called %q", text, err)
		}
	}
}

// To leave out --tls is not enough if another flag turns TLS on.
func TestAllFlagsThatTurnTLSOnAreNamed(t *testing.T) {
	ca, cert := x509.NewCertPool(), []tls.Certificate{{}}
	for flags, c := range map[string]*tls.Config{
		"--tls":                             {},
		"--tls and --cacert":                {RootCAs: ca},
		"--tls, --cert and --key":           {Certificates: cert},
		"--tls, --cacert, --cert and --key": {RootCAs: ca, Certificates: cert},
	} {
		for _, err := range []error{error(&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}), errors.New("tls: first record does not look like a TLS handshake")} {
			got := unconnected(&redis.UniversalOptions{TLSConfig: c}, err)
			if want := "begin the URL with redis:// and leave out " + flags + " ("; !strings.Contains(got.Error(), want) || !errors.Is(got, err) {
				t.Errorf("%q does not say %q", got, want)
			}
		}
	}
}
