package redisserver

import (
	"context"
	"embed"
	"encoding/hex"
	"slices"

	"github.com/redis/go-redis/v9"
)

//go:embed scripts/*.lua
var scriptFiles embed.FS

// Script is one operation of the protocol, which the server runs atomically. Both fields
// are strings, boxed once for go-redis.
type Script struct {
	Text any
	Sha  any // the hash by which Redis identifies the text
}

// The scripts. The header of each .lua file says what it takes, returns and guarantees.
var (
	AcquireScript     = loadScript("recheck_fast", "acquire_fast", "acquire_arguments", "common", "acquire")
	ReleaseScript     = loadScript("release_fast", "release_arguments", "common", "release")
	YieldScript       = loadScript("common", "yield")
	DowngradeScript   = loadScript("common", "downgrade")
	CancelScript      = loadScript("release_arguments", "common", "cancel")
	EvictScript       = loadScript("common", "evict")
	InspectScript     = loadScript("common", "inspect")
	RenewScript       = loadScript("renew")
	RenewSharedScript = loadScript("renew_shared")

	// The scripts for a quorum's servers: see vote_before.lua and adopt.lua. On a quorum, a cancel
	// often ends a request that owns the lock, as a release does.
	VoteAcquireScript   = loadScript("vote_fast", "vote_before", "recheck_fast", "acquire_arguments", "common", "acquire", "vote_after")
	VoteYieldScript     = loadScript("vote_before", "common", "yield", "vote_after")
	VoteDowngradeScript = loadScript("vote_before", "common", "downgrade", "vote_after")
	AdoptScript         = loadScript("common", "adopt")
	VoteCancelScript    = loadScript("release_fast", "release_arguments", "common", "cancel")
)

// loadScript joins the given files, in this order, into one script.
func loadScript(parts ...string) Script {
	var text []byte
	for _, part := range parts {
		b, err := scriptFiles.ReadFile("scripts/" + part + ".lua")
		if err != nil {
			panic(err) // embedded: cannot happen
		}
		text = append(text, b...)
	}
	sum := hashOf(text)
	return Script{string(text), hex.EncodeToString(sum[:])}
}

// onceCmd is a command that go-redis never repeats. The client repeats commands itself,
// under the same id, because it has to know that an earlier copy may still arrive.
type onceCmd struct{ *redis.Cmd }

// NoRetry tells go-redis not to repeat the command.
func (onceCmd) NoRetry() bool { return true }

// call returns the command that runs the script with a line of keys and arguments, by its hash or,
// for a server that does not know it yet, by its text. The command keeps the line.
func (s *Script) call(ctx context.Context, byText bool, line []any) onceCmd {
	if byText {
		line = slices.Clone(line) // an earlier command by the hash has this one
		line[0], line[1] = "eval", s.Text
	} else {
		line[0], line[1] = "evalsha", s.Sha
	}
	cmd := redis.NewCmd(ctx, line...)
	cmd.SetFirstKeyPos(firstKey)
	// Otherwise a Cluster's client first asks some node for its table of all commands, even a replica,
	// for up to 5 s beyond the context, and each time if the node refuses COMMAND.
	cmd.SetStepCount(1)
	return onceCmd{cmd}
}

// firstKey is the place of the first key in a line.
const firstKey = 3

// lineOf returns a line for Script.call. Its first two places are for what call puts there.
func lineOf(keys []any, args ...any) []any {
	line := append(make([]any, 2, firstKey+len(keys)+len(args)), len(keys))
	return append(append(line, keys...), args...)
}

// unknownScript reports whether the server did nothing because it does not know the script: the
// server is new or was restarted, or its scripts were flushed. A hook may have put the reply into an
// error of its own, of which only the text is left.
func unknownScript(err error) bool {
	return err != nil && (redis.HasErrorPrefix(err, "NOSCRIPT") || says(err, "NOSCRIPT No matching script"))
}
