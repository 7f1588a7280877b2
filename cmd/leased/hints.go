package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redisserver"
)

// hint says what a reply of Redis with a mark means, or another error, and what to do about it.
type hint struct{ mark, cause, advice string }

// hints are the replies about a connection, or a lock, that have an easy cause.
var hints = [...]hint{
	{"NOAUTH", "it requires a password", "give it in the URL, in $LEASED_REDIS rather than on the command line"},
	{"WRONGPASS", "it does not take this user or password", ""},
	{"OOM ", "its memory is full", "raise maxmemory, or free memory"},
	{"NOREPLICAS", "it has fewer replicas than its min-replicas-to-write", "fix the replicas, or lower the setting"},
	{"MISCONF", "it cannot save to disk", "make room on the disk, or see “Persistence” in docs/operating.md; Redis's log says why"},
	{"to run the 'scan' command", lacksRight, "allow +scan, which ls and top need beside the rights of locks"},
	{"NOPERM", lacksRight, leastRights}, // it names the user, who may be called anything
	{"READONLY", "it is a replica", "connect to its primary, or by --sentinel NAME; if you did, " + sentinelsBehind},
	{"can't run this command", lacksRight, leastRights}, // inside a script, up to Redis 7.0
	{"can't access at least one of the", lacksRight, leastRights},
	{"ACL failure in script", lacksRight, leastRights},
	{"CLUSTERDOWN", "the Cluster does not serve all slots", ""},
	{"TRYAGAIN", "the Cluster is moving the slot of the lock", "try again; if that lasts, see redis-cli --cluster check"},
	{"cluster support disabled", "it is not a Cluster node", "leave out --cluster"},
	{"MOVED ", "it is a node of a Cluster", "add --cluster"},
	{"unknown command 'sentinel'", "it is not a Sentinel", "leave out --sentinel"},
	{"unknown command `sentinel`", "it is not a Sentinel", "leave out --sentinel"}, // Redis 6.2
}

// hints of the network, whose errors have types.
var (
	closedByServer = hint{cause: "it closed the connection", advice: "if that lasts, it may be at its maxclients: see redis-cli INFO clients"}
	noAnswerInTime = hint{cause: "it did not answer in time"}
)

const (
	// sentinelsBehind is what to do where Sentinels were asked.
	sentinelsBehind = "the Sentinels name a replica: wait for the end of a failover, or look at SENTINEL GET-MASTER-ADDR-BY-NAME"

	lacksRight  = "this user lacks a right"
	leastRights = "allow the commands, keys and channels that docs/deployments.md lists under “Least rights”"
)

// hintFor returns the hint for an error, or one without any text. If servers replied, what they said
// counts for more than the silence of others.
func hintFor(err error) hint {
	for _, h := range hints {
		if redisserver.Replied(err, h.mark) {
			return h
		}
	}
	switch {
	case errors.Is(err, syscall.EPIPE):
		return closedByServer
	case timedOut(err):
		return noAnswerInTime
	}
	return hint{}
}

// timedOut reports whether err says that there was no answer in time.
func timedOut(err error) bool {
	return wraps(err, func(err error) bool {
		switch e := err.(type) { //nolint:errorlint // wraps unwraps
		case *net.OpError:
			// If no connection was made in time, the library leaves only the text of the error, so that
			// it does not match that of a context.
			text := e.Err.Error()
			return e.Timeout() || strings.Contains(text, "deadline exceeded") || strings.Contains(text, "i/o timeout")
		case net.Error: // that of a context, too
			return e.Timeout()
		}
		return false
	})
}

// wraps reports whether is returns true for err, or for an error that it wraps. Unlike errors.As, it goes on
// after one of the type that is looked for: each Sentinel, and each server of a quorum, may have replied.
func wraps(err error, is func(error) bool) bool {
	if err == nil || is(err) {
		return err != nil
	}
	switch e := err.(type) { //nolint:errorlint // this unwraps
	case interface{ Unwrap() error }:
		return wraps(e.Unwrap(), is)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return wraps(err, is) })
	}
	return false
}

// inPlainWords says what to do about an error that has an easy cause.
func inPlainWords(err error) error {
	switch h := hintFor(err); {
	case h.cause == "":
		return err
	case h.advice == "":
		return fmt.Errorf("%s (%w)", h.cause, err)
	default:
		return fmt.Errorf("%s: %s (%w)", h.cause, h.advice, err)
	}
}

// explain is inPlainWords for an error that stands alone, so that it has to say which server "it" is.
func (a *address) explain(err error) error {
	if hintFor(err).cause == "" || errors.As(err, new(named)) {
		return err
	}
	if a.place == "" { // a quorum, whose errors say which server
		return inPlainWords(err)
	}
	return fmt.Errorf("%s: %w", "Redis at "+a.place, inPlainWords(err))
}

// named is an error whose text already says which server it is about, and what is wrong there.
type named struct{ error }

func (n named) Unwrap() error { return n.error }

// unconnected is inPlainWords for the first command of a client. A server that expects TLS and one
// that does not know it have no words for each other, nor has a proxy that speaks only TCP and has no server.
func unconnected(o *redis.UniversalOptions, err error) error {
	switch {
	case o.TLSConfig == nil && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		return fmt.Errorf("it closed the connection without an answer: if it wants TLS, begin the URL with rediss:// or add --tls; "+
			"if it is a proxy, it may have no server; if it is Redis, it may be at its maxclients (%w)", err)
	case o.TLSConfig != nil && timedOut(err):
		return fmt.Errorf("it did not answer in time: if it does not speak TLS, %s (%w)", withoutTLS(o.TLSConfig), err)
	case o.TLSConfig != nil && strings.Contains(err.Error(), "first record does not look like a TLS handshake"):
		return fmt.Errorf("it does not speak TLS: %s (%w)", withoutTLS(o.TLSConfig), err)
	}
	return inPlainWords(err)
}

// withoutTLS says how to turn TLS off. --cacert and --cert turn it on, too.
func withoutTLS(c *tls.Config) string {
	flags := "--tls"
	switch ca, cert := c.RootCAs != nil, len(c.Certificates) > 0; {
	case ca && cert:
		flags = "--tls, --cacert, --cert and --key"
	case ca:
		flags = "--tls and --cacert"
	case cert:
		flags = "--tls, --cert and --key"
	}
	return "begin the URL with redis:// and leave out " + flags
}
