package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
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
	nodes, err := nodesOf(ctx, rdb)
	if err != nil {
		return nil, err
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

// nodesOf returns the servers that have subscribers: of a Cluster all masters, because a node knows only
// its own.
func nodesOf(ctx context.Context, rdb redis.UniversalClient) ([]redis.UniversalClient, error) {
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return []redis.UniversalClient{rdb}, nil
	}
	all, err := mastersOf(ctx, cluster)
	if err != nil {
		return nil, err
	}
	var nodes []redis.UniversalClient
	for _, node := range all {
		nodes = append(nodes, node)
	}
	return nodes, nil
}

// untraced is a lock of which Redis has no trace. Often it is another one that is meant: log lines and errors
// name locks without their prefix, so whoever follows them leaves it out.
type untraced struct {
	key, prefix string   // what was asked for
	others      []string // the prefixes that other clients here have, those of the most clients first
	used        string   // the one of these with which the lock is known, if state says that there is one
	state       string   // "held", "waited for" or "free", or "" if it is not known with any
}

// says returns the hint. later is whether it is still shown once the other lock may have another state.
func (u *untraced) says(later bool) string {
	text := fmt.Sprintf("Redis remembers no lock %q", u.key)
	state := ", which is " + u.state
	if later {
		state = ""
	}
	switch {
	case u.state != "" && u.used == "":
		return fmt.Sprintf("%s, but clients without a key prefix have one of this name%s; if you mean that one, give no --prefix", text, state)
	case u.state != "":
		return fmt.Sprintf("%s, but clients with key prefix %q have one of this name%s; if you mean that one, give --prefix %s",
			text, u.used, state, shellWord(u.used))
	case u.prefix == "":
		text += "; if your service sets a key prefix (WithKeyPrefix), give it by --prefix"
	default:
		text += fmt.Sprintf("; your service may have another key prefix than %q", u.prefix)
	}
	if len(u.others) == 0 {
		return text
	}
	var names []string
	for _, prefix := range u.others[:min(len(u.others), maxOthers)] {
		if prefix == "" {
			names = append(names, "none")
		} else {
			names = append(names, strconv.Quote(prefix))
		}
	}
	text += ": clients here have " + strings.Join(names, ", ")
	if more := len(u.others) - len(names); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// maxOthers is how many prefixes of others are named, and how many of them are tried.
const maxOthers = 8

// untraced returns what can be found out about a lock of which Redis has no trace. It returns nil if Redis
// has one, or does not say, and if the prefix seems to be right all the same.
func (c *connection) untraced(ctx context.Context, name string) *untraced {
	keys, err := protocol.NewKeys(c.prefix, name)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, aliasTime)
	defer cancel()
	here := c.snapshots(ctx, c.prefix, &keys)
	if len(here) == 0 || stateOfAny(here) != "" {
		return nil
	}
	u := &untraced{key: keys.Lock, prefix: c.prefix}
	var own bool
	u.others, own = c.otherPrefixes(ctx)
	if c.prefix != "" && own { // a lock of another service may have the same name
		return nil
	}
	for _, prefix := range u.others[:min(len(u.others), maxOthers)] {
		keys, err := protocol.NewKeys(prefix, name)
		if err != nil {
			continue
		}
		if state := stateOfAny(c.snapshots(ctx, prefix, &keys)); state != "" && (u.state == "" || u.state == stateFree) {
			u.used, u.state = prefix, state
		}
	}
	// A lock of the right prefix, too, has no trace once it was idle for long.
	if u.state == "" && len(u.others) == 0 && (c.prefix != "" || own) {
		return nil
	}
	return u
}

// hint returns what to say to whoever looks at a lock that may be another one than they mean, or "". For later,
// see untraced.says.
func (c *connection) hint(ctx context.Context, info leased.Info, later bool) string {
	switch useOf(info) {
	case inUse:
		if other := c.alias(ctx, info.Name); other != nil {
			return other.says()
		}
	case unknown:
		if u := c.untraced(ctx, info.Name); u != nil {
			return u.says(later)
		}
	}
	return ""
}

// snapshots returns what the servers that answer say of a lock.
func (c *connection) snapshots(ctx context.Context, prefix string, keys *protocol.Keys) []protocol.Snapshot {
	return askAll(c.servers, func(rdb redis.UniversalClient) (protocol.Snapshot, error) {
		return redisserver.New(rdb, prefix).Inspect(ctx, keys)
	})
}

// stateOfAny returns the state of a lock of which servers said this, or "" if none of them knows it.
func stateOfAny(said []protocol.Snapshot) string {
	switch {
	case slices.ContainsFunc(said, func(s protocol.Snapshot) bool { return s.Value != "" || len(s.Readers) > 0 }):
		return stateHeld
	case slices.ContainsFunc(said, func(s protocol.Snapshot) bool { return s.Length > 0 }):
		return "waited for"
	case slices.ContainsFunc(said, func(s protocol.Snapshot) bool { return s.Meta != "" }):
		return stateFree
	}
	return ""
}

// otherPrefixes returns the prefixes of the clients that listen, but not that of --prefix: those of the most
// clients first. own reports whether any has that one. Channels are of the whole server, so a client may use
// another DB of it.
func (c *connection) otherPrefixes(ctx context.Context) (others []string, own bool) {
	inbox := protocol.InboxChannel("", "")
	clients := map[string]int{}
	for _, rdb := range c.servers {
		nodes, err := nodesOf(ctx, rdb)
		if err != nil {
			continue
		}
		nodes = slices.DeleteFunc(nodes, func(node redis.UniversalClient) bool { return hasManyChannels(ctx, node) })
		for _, found := range askAll(nodes, func(node redis.UniversalClient) ([]string, error) {
			return node.PubSubChannels(ctx, "*"+globQuote(inbox)+"*").Result()
		}) {
			for _, channel := range found {
				if prefix, _, ok := strings.Cut(channel, inbox); ok && utf8.ValidString(prefix) {
					clients[prefix]++
				}
			}
		}
	}
	own = clients[c.prefix] > 0
	delete(clients, c.prefix)
	return slices.SortedFunc(maps.Keys(clients), func(a, b string) int {
		return cmp.Or(cmp.Compare(clients[b], clients[a]), cmp.Compare(a, b))
	}), own
}

// manyChannels is of how many channels a server is not asked for the names: it serves nobody else meanwhile, for
// 2.5 ms for each thousand of them.
const manyChannels = 20_000

// hasManyChannels reports whether a server is known to have so many.
func hasManyChannels(ctx context.Context, node redis.UniversalClient) bool {
	info, err := serverInfo(ctx, node)
	if err != nil { // no right to know
		return false
	}
	n, _ := strconv.Atoi(info["pubsub_channels"])
	return n > manyChannels
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
