package main

import (
	"context"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// What is good advice for a single server is not for one of a quorum: that one is told apart from a server that
// has lost its locks only if it comes back with all of its data, or with none.

// isOfQuorum reports whether a quorum has used the server, under the application's key prefix.
func isOfQuorum(ctx context.Context, node redis.Cmdable, prefix string) bool {
	mark, err := node.MGet(ctx, protocol.MarkKey(prefix)).Result()
	return err == nil && mark[0] != nil
}

func quorumPersistenceFinding(ctx context.Context, node redis.Cmdable, prefix string) finding {
	const what = "persistence"
	unknown := finding{verdictUnknown, what, "", "Whether this server of a quorum can come back with a part of its locks is not checked.", ""}
	value, ok := settingsOf(ctx, node, &unknown, "appendonly", "appendfsync", "no-appendfsync-on-rewrite", "save")
	if !ok {
		return unknown
	}
	f := finding{verdictBad, what, "append-only file, appendfsync " + value["appendfsync"],
		"The key " + strconv.Quote(protocol.MarkKey(prefix)) + " says that this is a server of a quorum. After a crash it would be back without its newest locks, and vote at once: " +
			"then two processes can own one lock.",
		`set appendonly yes, appendfsync always and no-appendfsync-on-rewrite no; or appendonly no and save "", and delete dump.rdb: a server without data ` +
			"does not vote until its quarantine is over. If it no longer belongs to a quorum, delete that key"}
	pauses := value["no-appendfsync-on-rewrite"] == "yes"
	switch snapshots := value["save"]; {
	case value["appendonly"] == "yes" && pauses:
		f.found += ", no-appendfsync-on-rewrite yes"
	case value["appendonly"] == "yes" && value["appendfsync"] == "always":
		return finding{verdictOK, what, f.found, "", ""}
	case value["appendonly"] == "yes":
	case snapshots == "":
		return finding{verdictOK, what, "none", "After a restart, this server of a quorum does not vote until its quarantine is over, unless Redis finds an old dump.rdb, which it loads.", ""}
	default:
		f.found = "only snapshots, save " + strings.TrimSpace(snapshots)
	}
	return f
}

func quorumReplicationFinding(info map[string]string) finding {
	n, _ := strconv.Atoi(info["connected_slaves"])
	if n == 0 {
		return finding{verdictOK, "replication", "no replicas, as it should be for a server of a quorum", "", ""}
	}
	return finding{verdictNote, "replication", count(n, "replica", "replicas"), "If one takes the place of this server of a quorum, it may lack the newest locks, and votes at once: then two " +
		"processes can own one lock.", "let nothing promote a replica; a server that is gone is replaced by an empty one"}
}
