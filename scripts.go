package leased

import (
	"context"
	"crypto/sha1" //nolint:gosec // the name Redis gives a script, no secret
	"embed"
	"encoding/hex"

	"github.com/redis/go-redis/v9"
)

//go:embed scripts/*.lua
var scriptFiles embed.FS

// script is one operation of the protocol, run by the server as one step.
type script struct{ text, sha any } // strings, boxed once

var (
	acquireScript     = loadScript("acquire_free", "common", "acquire")
	releaseScript     = loadScript("release_usual", "common", "release")
	yieldScript       = loadScript("common", "yield")
	downgradeScript   = loadScript("common", "downgrade")
	cancelScript      = loadScript("common", "cancel")
	evictScript       = loadScript("common", "evict")
	inspectScript     = loadScript("common", "inspect")
	renewScript       = loadScript("renew")
	renewSharedScript = loadScript("renew_shared")
)

func loadScript(parts ...string) script {
	var text []byte
	for _, part := range parts {
		b, err := scriptFiles.ReadFile("scripts/" + part + ".lua")
		if err != nil {
			panic(err) // embedded: cannot happen
		}
		text = append(text, b...)
	}
	sum := sha1.Sum(text) // what EVALSHA calls a script by; no secret
	return script{string(text), hex.EncodeToString(sum[:])}
}

// onceCmd is a command that go-redis never sends a second time by itself. We
// repeat commands, under the same id and knowing that we do.
type onceCmd struct{ *redis.Cmd }

func (onceCmd) NoRetry() bool { return true }

// call returns the command that runs the script: by its hash if the server should
// know it, else by its text.
func (s *script) call(ctx context.Context, byText bool, keys []any, args ...any) onceCmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	if byText {
		all = append(all, "eval", s.text, len(keys))
	} else {
		all = append(all, "evalsha", s.sha, len(keys))
	}
	all = append(all, keys...)
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	return onceCmd{cmd}
}

// unknownScript reports whether the server did nothing because it does not know
// the script: it restarted, or its scripts were flushed.
func unknownScript(err error) bool { return redis.HasErrorPrefix(err, "NOSCRIPT") }
