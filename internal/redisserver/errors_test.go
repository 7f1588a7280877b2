package redisserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// answerError is an error reply of Redis, as go-redis returns it.
type answerError string

func (e answerError) Error() string { return string(e) }
func (answerError) RedisError()     {}

func TestAnErrorSaysWhetherWaitingMendsIt(t *testing.T) {
	for text, want := range map[string]protocol.FailureKind{
		"LOADING Redis is loading the dataset in memory":                         protocol.RefusedNow,
		"OOM command not allowed when used memory > 'maxmemory'.":                protocol.RefusedNow,
		"READONLY You can't write against a read only replica.":                  protocol.RefusedNow,
		"NOREPLICAS Not enough good replicas to write.":                          protocol.RefusedNow,
		"BUSY Redis is busy running a script.":                                   protocol.RefusedNow,
		"NOAUTH Authentication required.":                                        protocol.NeedsOperator,
		"WRONGPASS invalid username-password pair or user is disabled.":          protocol.NeedsOperator,
		"NOPERM this user has no permissions to run the 'evalsha' command":       protocol.NeedsOperator,
		"NOPERM User u has no permissions to run the 'evalsha' command":          protocol.NeedsOperator,
		"ERR unauthenticated multibulk length":                                   protocol.NeedsOperator,
		"DENIED Redis is running in protected mode because protected mode is on": protocol.NeedsOperator,
		// inside a script, Redis 6.2
		"ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: The user executing the script can't run this command or subcommand ":                                         protocol.NeedsOperator,
		"ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: The user executing the script can't access at least one of the keys mentioned in the command arguments ":     protocol.NeedsOperator,
		"ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: The user executing the script can't access at least one of the channels mentioned in the command arguments ": protocol.NeedsOperator,
		// 7.0
		"ERR The user executing the script can't run this command or subcommand script: 6b, on @user_script:1.":                                     protocol.NeedsOperator,
		"ERR The user executing the script can't access at least one of the keys mentioned in the command arguments script: 6b, on @user_script:1.": protocol.NeedsOperator,
		// 7.2 and later, Valkey
		"ERR ACL failure in script: User u has no permissions to run the 'set' command script: 6b, on @user_script:1.": protocol.NeedsOperator,
		"ERR ACL failure in script: User u has no permissions to access the 'x' key script: 6b, on @user_script:1.":    protocol.NeedsOperator,
		"NOPERM ACL failure in script: No permissions to access a key":                                                 protocol.NeedsOperator,
		"upstream failure":                   protocol.NoAnswer, // of a proxy, Envoy, which may have passed the command on
		"upstream protocol error":            protocol.NoAnswer,
		"no upstream host":                   protocol.RefusedNow,
		"ERR server connection close":        protocol.NoAnswer,   // predixy
		"ERR no server connection avaliable": protocol.RefusedNow, //nolint:misspell // so does predixy
		"@user_script: 13: -READONLY You can't write against a read only replica.": protocol.RefusedNow, // from pcall, Redis 6.2
		"WRONGTYPE Operation against a key holding the wrong kind of value":        protocol.OtherType,
		"WRONGTYPE in other words": protocol.OtherType,
		"ERR WRONGTYPE Operation against a key holding the wrong kind of value script: 6b, on @user_script:20.": protocol.OtherType,
	} {
		if got := Classify(fmt.Errorf("wrapped: %w", answerError(text))); got.Kind != want {
			t.Errorf("%q is of kind %d, want %d", text, got.Kind, want)
		}
	}
	for _, c := range []struct {
		err  error
		want protocol.FailureKind
	}{
		{io.EOF, protocol.NoAnswer},
		{context.DeadlineExceeded, protocol.NoAnswer},
		{&net.OpError{Op: "read", Err: errors.New("reset")}, protocol.NoAnswer},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, protocol.NeverSent},
		{redis.ErrPoolTimeout, protocol.NeverSent},
		{redis.ErrPoolExhausted, protocol.NeverSent},
		{fmt.Errorf("redis: all sentinels specified in configuration are unreachable: %w", errors.Join(redis.Nil, io.EOF)), protocol.NoAnswer},
		{errPoolExhausted{3}, protocol.NoAnswer}, // a guess: the command may have been sent
		{ErrRedisClosed, protocol.ClientClosed},
	} {
		if got := Classify(c.err); got.Kind != c.want {
			t.Errorf("%v is of kind %d, want %d", c.err, got.Kind, c.want)
		}
	}
	if Classify(nil) != nil {
		t.Error("no error is a failure")
	}
}

// A connection broke, and the server has answered on another one since.
func TestACommandIsWorthSendingAgainWhereTheServerAnswersAgain(t *testing.T) {
	for _, err := range []error{io.EOF, answerError("READONLY You can't write against a read only replica.")} {
		if Classify(err).Again || !Classify(fmt.Errorf("wrapped: %w", answersAgain{err})).Again {
			t.Errorf("%v: worth it without an answer, or not worth it with one", err)
		}
	}
}

// A context of this package ended, which is not the caller's.
func TestNoErrorOfTheNetworkMatchesThatOfAContext(t *testing.T) {
	dial := &net.OpError{Op: "dial", Err: context.DeadlineExceeded}
	for _, c := range []struct {
		err     error
		notSent bool
		text    string
	}{
		{dial, true, dial.Error()},
		{context.DeadlineExceeded, false, ErrLateAnswer.Error()},
		{context.Canceled, false, "no answer from Redis: context canceled"},
	} {
		err := ofNetwork(c.err)
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			t.Errorf("%v matches the error of a context", err)
		}
		if notSent(err) != c.notSent || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%v becomes %v, which says that it was not sent: %v", c.err, err, notSent(err))
		}
	}
	if late := ofNetwork(context.DeadlineExceeded); !errors.Is(late, ErrLateAnswer) {
		t.Errorf("%v is not %v", late, ErrLateAnswer)
	}
}

// A context ends also while a command waits for a connection, but not every error of an exhausted pool comes from that.
func TestAPoolIsSaidToBeExhaustedOnlyWhereThatCanBeTheCause(t *testing.T) {
	rdb := redistest.MiniClient(t, redistest.Mini(t), func(o *redis.Options) { o.PoolSize, o.ContextTimeoutEnabled = 1, true })
	s := New(rdb, "")
	conn := rdb.Conn()
	if err := conn.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.explain(context.DeadlineExceeded); !PoolExhausted(err) {
		t.Errorf("%v, while the only connection is in use", err)
	}
	if err := s.explain(io.EOF); err != io.EOF { // it is not wrapped
		t.Errorf("the error of a connection becomes %v", err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.explain(context.DeadlineExceeded); PoolExhausted(err) {
		t.Errorf("%v, while the only connection is idle", err)
	}
}

// Not every node that no longer serves a slot says MOVED: see elsewhere.
func TestWhichErrorsMayBeOfANodeThatNoLongerServesTheSlot(t *testing.T) {
	for text, moved := range map[string]bool{
		"READONLY You can't write against a read only replica. script: 6b, on @user_script:1.":                                  true,
		"@user_script: 13: -READONLY You can't write against a read only replica.":                                              true, // Redis 6.2
		"CLUSTERDOWN The cluster is down":                                                                                       true,
		"MOVED 1 127.0.0.1:2":                                                                                                   true,
		"LOADING Redis is loading the dataset in memory":                                                                        true,
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.":                                      true,
		"ERR Script attempted to execute a write command while the cluster is down and readonly script: 6b, on @user_script:1.": true,
		"BUSY Redis is busy running a script.":                                                                                  false,
		"OOM command not allowed when used memory > 'maxmemory'.":                                                               false,
	} {
		got := Classify(answerError(text))
		if names := strings.HasPrefix(text, "MOVED"); got.Again != names {
			t.Errorf("%q: again %v", text, got.Again)
		}
		if got.Moved != moved {
			t.Errorf("%q: moved %v", text, got.Moved)
		}
	}
}

// A grant that no replica has is canceled; a renewal that none has is no more than refused. Redis has answered both.
func TestWhatTooFewReplicasHaveWasAnswered(t *testing.T) {
	few := &tooFewReplicas{got: 0, want: 1, timeout: time.Second}
	for _, c := range []struct {
		err         error
		unconfirmed bool
	}{{few, false}, {&unconfirmedGrant{few}, true}} {
		if fail := Classify(c.err); fail.Kind != protocol.RefusedNow || fail.LacksReplicas != c.unconfirmed {
			t.Errorf("%T: %v, unconfirmed %v", c.err, fail.Kind, fail.LacksReplicas)
		}
	}
}

// swallowing is a hook that neither passes commands on nor answers them, as a mock does.
type swallowing struct{}

func (swallowing) DialHook(next redis.DialHook) redis.DialHook { return next }
func (swallowing) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { return nil }
}
func (swallowing) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { return nil }
}

func TestACommandThatAHookSwallowsIsSaidToBe(t *testing.T) {
	o := redistest.Options("127.0.0.1:1")
	o.ContextTimeoutEnabled = true // so that the client itself is used, with its hook
	rdb := redis.NewClient(o)
	defer rdb.Close()
	rdb.AddHook(swallowing{})
	s := New(rdb, "")
	keys, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	_, asked := s.Do(t.Context(), &keys, &protocol.Command{Verb: protocol.Acquire, ID: "a", TTL: time.Second})
	_, inspected := s.Inspect(t.Context(), &keys)
	for _, err := range []error{asked, inspected} {
		if err == nil || !strings.Contains(err.Error(), "a hook or a mock of the Redis client may have swallowed the command") {
			t.Error(err)
		}
	}
}
