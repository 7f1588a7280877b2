package redisserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// telling are names of locks that Redis also says, as codes or in sentences.
var telling = [...]string{
	"NOPERM", "READONLY", "WRONGTYPE", "NOAUTH", "MOVED", "CLUSTERDOWN",
	"wrong kind of value", "Operation against a key holding the wrong kind of value",
	"the cluster is down", "while the cluster is down", "running in protected mode", "unauthenticated",
	"can't run this command", "ACL failure in script", "cluster support disabled", "not allowed from script",
	"NOPERM this user has no permissions to", "-READONLY You can't write against a read only replica.",
	"@user_script: 1: -READONLY You can't write",
}

// judged is all that is made of an error.
func judged(err error) string {
	failure := Classify(err)
	failure.Err = nil
	_, lacks := lacking(err)
	return fmt.Sprintf("%+v; of another type %v; lacking %v; stale %v", *failure, errors.As(inWords(err), new(*OtherTypeError)), lacks, stale(err))
}

func TestALocksNameIsNotTakenForWhatRedisSays(t *testing.T) {
	for _, form := range []string{
		"ERR unknown command 'evalsha', with args beginning with: '6b' '5' '%s' '%[1]s:{%[1]s}:queue' ",
		"ERR unknown command `EVALSHA`, with args beginning with: `6b`, `5`, `%s`, ", // Redis 6.2
		"ERR unknown command 'zrem', with args beginning with: '%s' ",
		"ERR ACL failure in script: User u has no permissions to access the '%s' key script: 6b, on @user_script:1.", // Redis 7.2
		"NOPERM User u has no permissions to access the '%s' key",
	} {
		want := judged(answerError(fmt.Sprintf(form, "x")))
		for _, name := range telling {
			err := answerError(fmt.Sprintf(form, name))
			if got := judged(err); got != want {
				t.Errorf("%q is taken for\n%s, not\n%s", err, got, want)
			}
			// A hook's error, which names the lock itself.
			of := fmt.Errorf("asking for %q: %w", name, answerError(fmt.Sprintf(form, name)))
			if got := judged(of); got != want {
				t.Errorf("%q is taken for\n%s, not\n%s", of, got, want)
			}
		}
	}
}

// The replies are those of redis-server 6.2.14, 7.0.15, and Valkey 9.1.2 and miniredis.
func TestACodeIsFoundBehindWhatAServerPutsAheadOfIt(t *testing.T) {
	for text, want := range map[string]string{
		"READONLY You can't write against a read only replica.":                                                                                     "READONLY",
		"READONLY You can't write against a read only replica. script: 119b, on @user_script:1.":                                                    "READONLY",
		"READONLY You can't write against a read only replica. script: on @user_script:1.":                                                          "READONLY",
		"@user_script: 1: -READONLY You can't write against a read only replica.":                                                                   "READONLY",
		"ERR Error running script (call to f_119b): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica.":        "READONLY",
		"ERR Error running script (call to f_119b): @user_script:1: @user_script: 1: -OOM command not allowed when used memory > 'maxmemory'.":      "OOM",
		"ERR Error running script (call to f_de4c): @user_script:1: WRONGTYPE Operation against a key holding the wrong kind of value":              "WRONGTYPE",
		"ERR WRONGTYPE Operation against a key holding the wrong kind of value script: 6b, on @user_script:20.":                                     "WRONGTYPE",
		"ERR running script (call to f_119b): @user_script:39: Invalid argument: WRONGTYPE Operation against a key holding the wrong kind of value": "WRONGTYPE",
		"ERR Error running script (call to f_e854): @user_script:1: @user_script: 1: Unknown Redis command called from Lua script":                  "",
		"ERR Error running script (call to f_0bf0): @user_script:1: user_script:1: READONLY said by the script itself":                              "",
		"ERR user_script:1: READONLY said by the script itself script: 8b, on @user_script:1.":                                                      "",
		"ERR unknown command 'evalsha', with args beginning with: 'abc' '1' 'NOPERM' ":                                                              "",
		"ERR The user executing the script can't run this command or subcommand script: 7e68, on @user_script:1.":                                   "",
		"NOPERM ACL failure in script: No permissions to access a key":                                                                              "NOPERM",
		"Error from a proxy": "",
		"":                   "",
	} {
		if got := parseRefusal(text).code; got != want {
			t.Errorf("%q has the code %q, not %q", text, got, want)
		}
	}
}

// Each Sentinel has an error of its own, and of some errors only the text is left.
func TestARefusalIsFoundInsideOtherErrors(t *testing.T) {
	noAuth := answerError("NOAUTH Authentication required.")
	for _, err := range []error{
		fmt.Errorf("sentinels: %w", errors.Join(redis.Nil, noAuth)),
		errors.Join(redis.Nil, errors.New("NOAUTH HELLO must be called with the client already authenticated")),
		answerError("EXECABORT Transaction discarded because of: NOPERM this user has no permissions"),
		fmt.Errorf("%w, %w", context.DeadlineExceeded, fmt.Errorf("hello: %w", noAuth)),
		fmt.Errorf("evalsha failed: %v", noAuth),
		ofNetwork(errors.Join(noAuth, context.Canceled)),
		&unconfirmedGrant{&noWAIT{noAuth}},
	} {
		if !OnlyOperatorHelps(err) {
			t.Errorf("%v: no password is not found in it", err)
		}
	}
	for _, code := range []string{"NOAUTH", "LOADING"} { // where the codes of all replies are known
		if err := errors.Join(answerError("LOADING Redis is loading"), redis.Nil, noAuth); !hasCode(err, code) {
			t.Errorf("%v: no %s is found in it", err, code)
		}
	}
	wrong := errors.New("evalsha failed: WRONGTYPE Operation against a key holding the wrong kind of value")
	if !wrongType(wrong) {
		t.Errorf("%v: not of another type", wrong)
	}
}

func TestOnlyAReplyIsRepliedToHaveASentence(t *testing.T) {
	answer := answerError("ERR the sentence of a server")
	for _, c := range []struct {
		err  error
		want bool
	}{
		{answer, true},
		{fmt.Errorf("wrapped: %w", answer), true},
		{errors.Join(io.EOF, answer), true},
		{answerError("ERR other words"), false},
		{errors.New("a lock called the sentence"), false},
		{nil, false},
	} {
		if Replied(c.err, "the sentence") != c.want {
			t.Errorf("%v: replied %v", c.err, !c.want)
		}
	}
}

func TestWhatIsRefusedForATimePasses(t *testing.T) {
	for text, want := range map[string]bool{
		"LOADING Redis is loading the dataset in memory":                                   true,
		"BUSY Redis is busy running a script. You can only call SCRIPT KILL.":              true,
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": true,
		"CLUSTERDOWN Hash slot not served":                                                 true,
		"TRYAGAIN Multiple keys request during rehashing of slot":                          true,
		"BUSYGROUP Consumer Group name already exists":                                     false,
		"NOPERM this user has no permissions to run the 'subscribe' command":               false,
		"ERR unknown command 'subscribe', with args beginning with: 'LOADING' ":            false,
		"MISCONF Redis is configured to save RDB snapshots, but it's unable to persist":    false,
		"OOM command not allowed when used memory > 'maxmemory'.":                          false,
	} {
		for _, err := range []error{answerError(text), fmt.Errorf("asking for %q: %w", "LOADING", answerError(text))} {
			if Passes(err) != want {
				t.Errorf("%q passes: %v", err, !want)
			}
		}
	}
	if Passes(nil) || Passes(errors.New("lock \"LOADING\" has no answer")) {
		t.Error("what is no reply passes")
	}
}

// The server repeats a lock's name where it does not know a command, and names what a user may not do.
func TestALockThatIsCalledWhatRedisSaysGetsTheErrorsOfAnyOther(t *testing.T) {
	lacks := redistest.Server(t, "--rename-command", "EVALSHA", "", "--rename-command", "EVAL", "", "--rename-command", "ZREM", "")
	admin := redistest.Server(t)
	for user, rules := range map[string][]any{
		"noscripts": {"~*", "+@all", "-evalsha", "-eval"},
		"noget":     {"~*", "+@all", "-get", "-set"}, // inside scripts
		"nokeys":    {"resetkeys", "~other", "+@all"},
		"noecho":    {"~*", "+@all", "-zrem"},
	} {
		if err := admin.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", user, "on", ">pass", "&*"}, rules...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	as := func(user string) *redis.Client {
		return admin.Client(func(o *redis.Options) { o.Username, o.Password = user, "pass" })
	}
	id := protocol.NewRequest(protocol.NewClientID("a"), protocol.Exclusive, time.Minute, false, protocol.Counted, protocol.Origin{}).ID
	acquire := func(s *Server, k *protocol.Keys) error {
		_, err := s.Do(t.Context(), k, &protocol.Command{Verb: protocol.Acquire, ID: id, TTL: time.Second})
		return err
	}
	cancel := func(s *Server, k *protocol.Keys) error {
		return s.Cancel(t.Context(), []protocol.CancelRequest{{ID: id, Keys: k}})[0].Fail.Err
	}
	echo := func(s *Server, k *protocol.Keys) error {
		_, err := s.Echo(t.Context(), k, s.Inboxes+"nobody", "nonce")
		return err
	}
	for _, c := range []struct {
		what string
		rdb  *redis.Client
		ask  func(*Server, *protocol.Keys) error
	}{
		{"acquire of a server that has no EVAL", lacks.Client(), acquire},
		{"cancel of a server that has no EVAL", lacks.Client(), cancel},
		{"echo of a server that has no ZREM", lacks.Client(), echo},
		{"acquire without the right to EVAL", as("noscripts"), acquire},
		{"cancel without the right to EVAL", as("noscripts"), cancel},
		{"acquire without the right to GET", as("noget"), acquire},
		{"acquire without the right to keys", as("nokeys"), acquire},
		{"cancel without the right to keys", as("nokeys"), cancel},
		{"echo without the right to ZREM", as("noecho"), echo},
	} {
		ask := func(name string) string {
			keys, err := protocol.NewKeys("", name)
			if err != nil {
				t.Fatal(err)
			}
			s := New(c.rdb, "")
			err = c.ask(s, &keys)
			if err == nil {
				t.Fatal(c.what, "had no error")
			}
			return fmt.Sprintf("%s, after %d commands", judged(err), s.Commands())
		}
		ask("x") // has the server load the script
		want := ask("x")
		for _, name := range telling {
			if got := ask(name); got != want {
				t.Errorf("%s: a lock called %q gets\n%s, not\n%s", c.what, name, got, want)
			}
		}
	}
}
