package redisserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// ErrRedisClosed is the error of a command sent through a closed *redis.Client. It is permanent. It
// matches ErrClosed and redis.ErrClosed.
var ErrRedisClosed error = redisClosed{}

type redisClosed struct{}

func (redisClosed) Error() string {
	return "the Redis client is closed, so its locks cannot be used anymore; close it after the leased.Client"
}
func (redisClosed) Unwrap() []error { return []error{protocol.ErrClosed, redis.ErrClosed} }

// errPoolExhausted is the error of a command that got no connection in time. It matches
// redis.ErrPoolTimeout.
type errPoolExhausted struct{ size int }

func (e errPoolExhausted) Error() string {
	return fmt.Sprintf("no connection to Redis came free in time: the Redis client's pool of %d is exhausted", e.size)
}
func (errPoolExhausted) Unwrap() error { return redis.ErrPoolTimeout }

// PoolExhausted reports whether err means that a command got no connection in time, or none at all because
// of MaxActiveConns, which says more about the client than about the server.
func PoolExhausted(err error) bool {
	return errors.Is(err, redis.ErrPoolTimeout) || ConnectionsInUse(err)
}

// ConnectionsInUse reports whether err means that MaxActiveConns connections were in use. go-redis does not
// wait for one of them then.
func ConnectionsInUse(err error) bool { return errors.Is(err, redis.ErrPoolExhausted) }

// OtherTypeError is a WRONGTYPE error, with a message that says what it means for a lock.
type OtherTypeError struct{ Answer error }

func (e *OtherTypeError) Error() string {
	return "the lock's Redis key, or one of its helper keys, holds another type of value: " +
		"another program, such as Redisson, uses this name: " + e.Answer.Error()
}

// Unwrap returns the error as Redis sent it.
func (e *OtherTypeError) Unwrap() error { return e.Answer }

// inWords replaces an error of Redis whose text does not say what it means for a lock.
func inWords(err error) error {
	if wrongType(err) {
		return &OtherTypeError{err}
	}
	if text, missing := lacking(err); missing {
		return &LackingError{text, err}
	}
	return err
}

// LackingError is the answer of a server, or of a proxy in front of it, that cannot run the lock
// scripts, or cannot run them for this Redis client. Its text says what is missing and what to do.
type LackingError struct {
	text   string
	Answer error
}

func (e *LackingError) Error() string {
	return e.text + ": " + strings.ReplaceAll(e.Answer.Error(), "\n", "; ")
}

// What says what is missing and what to do, without what the server said.
func (e *LackingError) What() string { return e.text }

// Unwrap returns the error as the server sent it.
func (e *LackingError) Unwrap() error { return e.Answer }

// serverLacks and clientLacks say, with what follows, what is missing and what to do.
func serverLacks(what string) string {
	return "this server cannot keep locks: " + what + " (docs/deployments.md lists servers)"
}

func clientLacks(what string) string {
	return "the Redis client is not set up for this server: " + what
}

// What is missing, where servers say it in several ways.
const (
	noCommand       = "it does not know a command that the scripts call; use Redis 6.2 or later, or Valkey"
	noEval          = "it runs no Lua scripts; use a server, or a proxy, that has EVAL and EVALSHA"
	notSentinel     = "it is not a Sentinel; name the Sentinels' own addresses, or use redis.NewClient"
	noNotifications = "it sends no notifications of maintenance; set Mode in MaintNotificationsConfig to ModeAuto or ModeDisabled"
)

// onlyNil reports whether the text of joined errors has only those of replies that are nil.
func onlyNil(joined string) bool {
	for line := range strings.Lines(joined) {
		if strings.TrimSpace(line) != redis.Nil.Error() {
			return false
		}
	}
	return joined != ""
}

// lacking reports whether err means that the server or the client lacks something that the scripts
// need, and says what that is.
func lacking(err error) (text string, missing bool) {
	if err == nil {
		return "", false
	}
	var answer string
	for _, r := range refusalsIn(err) {
		answer += strings.ToLower(r.text) + "\n"
	}
	for _, l := range [...]struct{ mark, what string }{
		{"write commands not allowed after non deterministic", // Redis 5 and 6
			"its scripts may not write once they have read the clock; set lua-replicate-commands to yes, or use Redis 7 or later"},
		{"not allowed from script", // also "... from scripts"
			"it does not let scripts call a command that they need, such as TIME; use a server that does"},
		{"unknown redis command called from", // a script, or "Lua script"; Valkey 8 does not say "redis"
			noCommand},
		{"unknown command called from", noCommand},
		{"passed using the keys array", // a proxy that reads the scripts
			"a proxy refuses how the scripts name their keys; disable its check of scripts, or connect to the servers themselves"},
		{"could not find scripting engine", "it runs no Lua scripts; load the Lua engine that comes with the server"},
		{"scripting support disabled", "its Lua scripts are disabled"}, // Garnet, which should not be used even if they are enabled
		{"unknown command 'eval", noEval},
		{"unknown command `eval", noEval},
		{"unsupported command 'eval", noEval},
	} {
		if strings.Contains(answer, l.mark) {
			return serverLacks(l.what), true
		}
	}
	for _, l := range [...]struct{ mark, what string }{
		{"unauthenticated", // Redis refuses long commands before it asks for a password
			"it requires a password; set Password in the client's options"},
		{"cluster support disabled", "it is not part of a Cluster; use redis.NewClient"},
		{"unknown command 'sentinel", notSentinel},
		{"unknown command `sentinel", notSentinel},
		{"unknown subcommand 'maint_notifications'", noNotifications},
		{"wrong number of arguments for 'maint_notifications'", noNotifications}, // before Redis 7
		{"failed to enable maintnotifications: server does not support", noNotifications},
	} {
		if strings.Contains(answer, l.mark) {
			return clientLacks(l.what), true
		}
	}
	if _, each, asked := strings.Cut(strings.ToLower(err.Error()), "all sentinels specified in configuration are unreachable: "); asked && onlyNil(each) {
		return clientLacks("its Sentinels know no primary of that name; set MasterName to the name in their configuration"), true
	}
	return "", false
}

// Classify returns what the error of a command means, and nil for a nil error. It calls methods of
// err, which can be user code, so the caller must not hold a mutex.
func Classify(err error) *protocol.Failure {
	fail := classify(err)
	if fail != nil {
		fail.LacksReplicas = errors.As(err, new(*unconfirmedGrant))
	}
	return fail
}

func classify(err error) *protocol.Failure {
	if err == nil {
		return nil
	}
	var known interface {
		error
		FailureKind() protocol.FailureKind
	}
	// A node that names another one has carried out nothing.
	again := errors.As(err, new(answersAgain)) || redis.HasErrorPrefix(err, "MOVED")
	switch {
	case errors.As(err, &known): // from a quorum, which has classified the errors of its servers
		return &protocol.Failure{Err: err, Kind: known.FailureKind()}
	case errors.Is(err, ErrRedisClosed):
		return &protocol.Failure{Err: err, Kind: protocol.ClientClosed}
	case wrongType(err):
		return &protocol.Failure{Err: err, Kind: protocol.OtherType}
	case OnlyOperatorHelps(err):
		return &protocol.Failure{Err: err, Kind: protocol.NeedsOperator, Partly: insideScript(err)}
	// The last one is the error of a renewal, which Redis has answered.
	case refused(err), errors.As(err, new(*noTurn)), errors.As(err, new(*tooFewReplicas)):
		return &protocol.Failure{Err: err, Kind: protocol.RefusedNow, Moved: elsewhere(err), Again: again}
	case notSent(err) && !errors.As(err, new(errPoolExhausted)): // this one is a guess
		return &protocol.Failure{Err: err, Kind: protocol.NeverSent}
	}
	return &protocol.Failure{Err: err, Kind: protocol.NoAnswer, Again: again}
}

// elsewhere reports whether err may be the answer of a node of a Cluster that does not serve the slot. A
// command sent to one node, as with WithReplicas, is not redirected. Where the client reads from replicas,
// a master that has become one runs scripts until they write, and names no other node, nor does it while it
// loads the data of its own master. And a master that is cut off from the others runs them until they write
// with cluster-allow-reads-when-down.
func elsewhere(err error) bool {
	for _, prefix := range [...]string{"CLUSTERDOWN", "MOVED", "LOADING", "MASTERDOWN"} {
		if redis.HasErrorPrefix(err, prefix) {
			return true
		}
	}
	return readOnly(err) || IsServerReply(err) && says(err, "while the cluster is down")
}

// OnlyOperatorHelps reports whether err is a reply of Redis whose cause only an operator can remove,
// so that repeating the command soon is pointless.
func OnlyOperatorHelps(err error) bool {
	if hasCode(err, "NOAUTH", "WRONGPASS", "NOPERM") || wrongType(err) || insideScript(err) {
		return true
	}
	if says(err,
		"unauthenticated multibulk length", "unauthenticated bulk length",
		"running in protected mode",
		// of errors of which only the text is left
		"NOAUTH Authentication required", "NOAUTH HELLO must be called", "WRONGPASS invalid",
		"NOPERM this user has no permissions to", "NOPERM No permissions to access", "has no permissions to run the",
	) {
		return true
	}
	return errors.As(err, new(*LackingError))
}

// Passes reports whether err is a reply of a server, or of a node of a Cluster, that for a time refuses all
// commands, or all that need its data, whatever they are.
func Passes(err error) bool {
	return hasCode(err, "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")
}

// insideScript reports whether err says that the user lacks the right to a command that a script calls. What the
// script has done before that stays done.
func insideScript(err error) bool {
	return says(err,
		"can't run this command", "can't access at least one of the", // up to Redis 7.0
		"ACL failure in script", // from Redis 7.2 on, and Valkey
	)
}

// wrongType reports whether err says that a key holds another type of value.
func wrongType(err error) bool {
	return err != nil && (hasCode(err, "WRONGTYPE") || says(err, "Operation against a key holding the wrong kind of value"))
}

// IsServerReply reports whether err is a reply of Redis, or of a proxy in front of it. No script replies
// nil: it is a Sentinel that does, and go-redis joins its reply to the errors of the Sentinels that it did
// not reach.
func IsServerReply(err error) bool {
	var answer redis.Error
	return errors.As(err, &answer) && !errors.Is(err, redis.Nil)
}

// refused reports whether err is a reply that the command had no effect. Without a reply, it may have run
// or may still run. So it may if a proxy lost the server after it had passed the command on.
func refused(err error) bool {
	var answer redis.Error
	if !IsServerReply(err) || !errors.As(err, &answer) {
		return false
	}
	text := answer.Error()
	for _, lost := range [...]string{
		"upstream failure", "upstream protocol error", // Envoy
		"ERR server connection close", // predixy
	} {
		if strings.HasPrefix(text, lost) {
			return false
		}
	}
	return true
}

// notSent reports whether the command was certainly not sent, for lack of a connection.
func notSent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial" || PoolExhausted(err)
}

// ErrLateAnswer is the error of a command that had no answer in time. It does not match the error of a
// context, because what ended was the time for the command, and not the caller's.
var ErrLateAnswer = errors.New("no answer from Redis in time")

// ofNetwork replaces a network error that matches a context's error. That context was an internal
// one, and a caller would mistake the error for that of its own context.
func ofNetwork(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		if notSent(err) {
			return &net.OpError{Op: "dial", Err: errors.New(err.Error())}
		}
		if errors.Is(err, context.DeadlineExceeded) {
			return ErrLateAnswer
		}
		return fmt.Errorf("no answer from Redis: %v", err) //nolint:errorlint // %v on purpose: see above
	}
	return err
}
