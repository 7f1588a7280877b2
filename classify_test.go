package leased

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/redis/go-redis/v9"
)

// answerError is an error of Redis as go-redis returns it.
type answerError string

func (e answerError) Error() string { return string(e) }
func (answerError) RedisError()     {}

func TestAnErrorSaysWhetherWaitingMendsIt(t *testing.T) {
	for text, want := range map[string]failureKind{
		"LOADING Redis is loading the dataset in memory":                         refusedNow,
		"OOM command not allowed when used memory > 'maxmemory'.":                refusedNow,
		"READONLY You can't write against a read only replica.":                  refusedNow,
		"NOREPLICAS Not enough good replicas to write.":                          refusedNow,
		"BUSY Redis is busy running a script.":                                   refusedNow,
		"NOAUTH Authentication required.":                                        needsOperator,
		"WRONGPASS invalid username-password pair or user is disabled.":          needsOperator,
		"NOPERM this user has no permissions to run the 'evalsha' command":       needsOperator,
		"NOPERM User u has no permissions to run the 'evalsha' command":          needsOperator,
		"ERR unauthenticated multibulk length":                                   needsOperator,
		"DENIED Redis is running in protected mode because protected mode is on": needsOperator,
		// inside a script: 6.2
		"ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: The user executing the script can't run this command or subcommand ":                                         needsOperator,
		"ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: The user executing the script can't access at least one of the keys mentioned in the command arguments ":     needsOperator,
		"ERR Error running script (call to f_6b): @user_script:1: @user_script: 1: The user executing the script can't access at least one of the channels mentioned in the command arguments ": needsOperator,
		// 7.0
		"ERR The user executing the script can't run this command or subcommand script: 6b, on @user_script:1.":                                     needsOperator,
		"ERR The user executing the script can't access at least one of the keys mentioned in the command arguments script: 6b, on @user_script:1.": needsOperator,
		// 7.2 and later, Valkey
		"ERR ACL failure in script: User u has no permissions to run the 'set' command script: 6b, on @user_script:1.": needsOperator,
		"ERR ACL failure in script: User u has no permissions to access the 'x' key script: 6b, on @user_script:1.":    needsOperator,
		"NOPERM ACL failure in script: No permissions to access a key":                                                 needsOperator,
		"WRONGTYPE Operation against a key holding the wrong kind of value":                                            otherType,
		"ERR WRONGTYPE Operation against a key holding the wrong kind of value script: 6b, on @user_script:20.":        otherType,
	} {
		if got := classify(fmt.Errorf("wrapped: %w", answerError(text))); got.kind != want {
			t.Errorf("%q is of kind %d, want %d", text, got.kind, want)
		}
	}
	for _, c := range []struct {
		err  error
		want failureKind
	}{
		{io.EOF, noAnswer},
		{context.DeadlineExceeded, noAnswer},
		{&net.OpError{Op: "read", Err: errors.New("reset")}, noAnswer},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, neverSent},
		{redis.ErrPoolTimeout, neverSent},
		{errPoolExhausted{3}, noAnswer}, // a guess
		{errRedisClosed, clientClosed},
	} {
		if got := classify(c.err); got.kind != c.want {
			t.Errorf("%v is of kind %d, want %d", c.err, got.kind, c.want)
		}
	}
	if classify(nil) != nil {
		t.Error("no error is a failure")
	}
}
