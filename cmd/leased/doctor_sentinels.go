package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// A primary that was replaced, and that the Sentinels cannot demote, goes on giving locks to those who have
// not heard of the failover: then two processes own one lock. The new primary does not know of it, but the
// Sentinels do.

// sentinelView is what a Sentinel says of the servers behind the name of a primary.
type sentinelView struct {
	primary  string              // HOST:PORT
	replicas []map[string]string // the fields of SENTINEL REPLICAS
}

// replicasFinding says whether what the Sentinels take for replicas are replicas.
func replicasFinding(ctx context.Context, o *redis.UniversalOptions) finding {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	var answers []sentinelView
	var failed error
	for _, addr := range o.Addrs {
		answer, err := askSentinel(ctx, o, addr)
		if err != nil {
			failed = cmp.Or(failed, fmt.Errorf("%s: %w", addr, err))
			continue
		}
		answers = append(answers, answer)
	}
	return rolesFinding(answers, failed)
}

func askSentinel(ctx context.Context, o *redis.UniversalOptions, addr string) (sentinelView, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTime/4) // so that one that hangs leaves time for others
	defer cancel()
	sentinel := redis.NewSentinelClient(&redis.Options{
		Addr: addr, Username: o.SentinelUsername, Password: o.SentinelPassword, TLSConfig: o.TLSConfig, Dialer: o.Dialer,
		ContextTimeoutEnabled: true, DialerRetries: 1, MaxRetries: -1, MaintNotificationsConfig: o.MaintNotificationsConfig,
	})
	defer sentinel.Close()
	at, err := sentinel.GetMasterAddrByName(ctx, o.MasterName).Result()
	if err != nil {
		return sentinelView{}, err
	}
	if len(at) != 2 {
		return sentinelView{}, errors.New("it names no primary")
	}
	replicas, err := sentinel.Replicas(ctx, o.MasterName).Result()
	return sentinelView{net.JoinHostPort(at[0], at[1]), replicas}, err
}

// rolesFinding goes by those Sentinels that name the primary which most of them name: others have yet to
// hear of a failover. Each has asked the servers itself, so one that was told another role is enough.
func rolesFinding(answers []sentinelView, failed error) finding {
	const what = "replicas"
	unknown := finding{verdictUnknown, what, "", "Whether a primary that was replaced still gives locks is not checked.", ""}
	votes, primary := map[string]int{}, ""
	for _, answer := range answers {
		if votes[answer.primary]++; votes[answer.primary] > votes[primary] {
			primary = answer.primary
		}
	}
	switch {
	case len(answers) == 0 && failed != nil:
		unknown.found = failed.Error()
		if strings.Contains(unknown.found, "NOPERM") {
			unknown.change = "allow +sentinel|replicas at the Sentinels, for this check only"
		}
		return unknown
	case 2*votes[primary] <= len(answers):
		unknown.found, unknown.change = "no majority of the Sentinels that answered names the same primary", "wait for the end of a failover"
		return unknown
	}
	known, strays := map[string]bool{}, map[string]bool{}
	for _, answer := range answers {
		if answer.primary != primary {
			continue
		}
		for _, replica := range answer.replicas {
			addr := net.JoinHostPort(replica["ip"], replica["port"])
			known[addr] = true
			strays[addr] = strays[addr] || replica["role-reported"] == "master"
		}
	}
	var found, change []string
	host, port, _ := net.SplitHostPort(primary)
	for _, addr := range slices.Sorted(maps.Keys(known)) {
		if strays[addr] {
			found = append(found, addr+" is to be a replica, but says that it is a primary")
			change = append(change, fmt.Sprintf("REPLICAOF %s %s at %s", host, port, addr))
		}
	}
	if len(found) == 0 {
		return finding{verdictOK, what, count(len(known), "replica", "replicas") + " of the Sentinels, none of which says that it is a primary", "", ""}
	}
	return finding{verdictBad, what, strings.Join(found, "; "), "Processes that have not heard of the failover lock there: then two processes own one lock.",
		strings.Join(change, "; ") + "; see why the Sentinels do not demote it: their rights there, or the connection"}
}
