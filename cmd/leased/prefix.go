package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// The key of a lock does not tell where its prefix ends, but messages go to channels that begin with
// the prefix. Under another prefix, the lock is the same, but its clients hear nothing: an owner that
// is evicted works on, and those who wait are taken for dead and lose their places.

// alias is a lock as its clients name it, who have another prefix than --prefix said.
type alias struct{ key, prefix, name string }

// says tells what the lock is called, and the prefix and name to give. It is no command to copy: that would
// leave out where Redis is, and so go to another one.
func (a *alias) says() string {
	if a.prefix == "" {
		return fmt.Sprintf("%q is lock %q of clients without a key prefix; give the name %s, and no --prefix", a.key, a.name, shellWord(a.name))
	}
	return fmt.Sprintf("%q is lock %q of clients with key prefix %q; give --prefix %s and the name %s", a.key, a.name, a.prefix, shellWord(a.prefix), shellWord(a.name))
}

var plainWord = regexp.MustCompile(`^[\w@%+=:,./-]+$`)

// shellWord quotes text for a shell, if it has to be.
func shellWord(text string) string {
	if plainWord.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

const (
	aliasTime    = time.Second // for finding out what a lock's clients name it
	aliasClients = 8           // those whose channels are looked for, each of which the server compares with all channels
)

// alias returns the lock's other name, or nil if its clients hear what we send, or nobody knows: Redis
// does not say, or none of them can be found.
func (c *connection) alias(ctx context.Context, name string) *alias {
	keys, err := protocol.NewKeys(c.prefix, name)
	if err != nil {
		return nil // whoever uses the name says what is wrong with it
	}
	ctx, cancel := context.WithTimeout(ctx, aliasTime)
	defer cancel()
	for _, found := range askAll(c.servers, func(rdb redis.UniversalClient) (*alias, error) { return aliasOn(ctx, rdb, c.prefix, keys) }) {
		if found != nil {
			return found
		}
	}
	return nil
}

// aliasOn is alias for one server of a quorum, or the only one.
func aliasOn(ctx context.Context, rdb redis.UniversalClient, prefix string, keys protocol.Keys) (*alias, error) {
	s, err := redisserver.New(rdb, prefix).Inspect(ctx, &keys)
	if err != nil {
		return nil, err
	}
	clients := clientsOf(&s)
	if len(clients) == 0 {
		return nil, nil
	}
	nodes := []redis.UniversalClient{rdb}
	if cluster, ok := rdb.(*redis.ClusterClient); ok { // a node knows only its own subscribers
		all, err := mastersOf(ctx, cluster)
		if err != nil {
			return nil, err
		}
		nodes = nil
		for _, node := range all {
			nodes = append(nodes, node)
		}
	}
	channels := make([]string, len(clients))
	for i, client := range clients {
		channels[i] = protocol.InboxChannel(prefix, client)
	}
	counts := askAll(nodes, func(node redis.UniversalClient) (map[string]int64, error) {
		return node.PubSubNumSub(ctx, channels...).Result()
	})
	// Clients may have different prefixes. The owner comes first, and the first one that is found decides.
	for i, client := range clients {
		if slices.ContainsFunc(counts, func(count map[string]int64) bool { return count[channels[i]] > 0 }) {
			return nil, nil
		}
		inbox := protocol.InboxChannel("", client)
		for _, found := range askAll(nodes, func(node redis.UniversalClient) ([]string, error) {
			return node.PubSubChannels(ctx, "*"+globQuote(inbox)).Result()
		}) {
			for _, channel := range found {
				before, ok := strings.CutSuffix(channel, inbox)
				if rest, in := strings.CutPrefix(keys.Lock, before); ok && in && rest != "" && before != prefix {
					return &alias{keys.Lock, before, rest}, nil
				}
			}
		}
	}
	return nil, nil
}

// clientsOf returns clients of this library that own a lock or wait for it, each once.
func clientsOf(s *protocol.Snapshot) []string {
	var clients []string
	add := func(who protocol.Identity, ok bool) {
		if ok && len(clients) < aliasClients && !slices.Contains(clients, who.Client) {
			clients = append(clients, who.Client)
		}
	}
	add(protocol.OwnerOf(s.Value))
	for i := 0; i < len(s.Readers); i += 2 {
		who, err := protocol.ParseID(s.Readers[i])
		add(who, err == nil)
	}
	for _, id := range s.Queue {
		who, err := protocol.ParseID(id)
		add(who, err == nil)
	}
	return clients
}

// askAll asks all nodes at once, and returns what those said that did not fail.
func askAll[T any](nodes []redis.UniversalClient, ask func(redis.UniversalClient) (T, error)) []T {
	said, failures := make([]T, len(nodes)), make([]error, len(nodes))
	var all sync.WaitGroup
	for i, node := range nodes {
		all.Go(func() { said[i], failures[i] = ask(node) }) // waited for below
	}
	all.Wait()
	var found []T
	for i, err := range failures {
		if err == nil {
			found = append(found, said[i])
		}
	}
	return found
}
