package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// scanCount is how many of the server's keys one call of SCAN looks at. Nothing else bounds how
// long the call blocks the server: some 50 µs, or 200 µs on a busy machine.
const scanCount = 100

// scanLocks calls f with the names of the locks that Redis remembers, until f returns false. A lock
// that was held has a key with its last token, and one that is waited for has a queue, also while a client of
// another library has it. The names of these keys say which lock they belong to. scanLocks may call f more
// than once with the same name.
func scanLocks(ctx context.Context, rdb redis.UniversalClient, prefix, pattern string, f func(name string) bool) error {
	s := newScan(prefix, pattern)
	for !s.over() {
		names, err := s.step(ctx, rdb)
		if err != nil {
			return err
		}
		for _, name := range names {
			if !f(name) {
				return nil
			}
		}
	}
	return nil
}

// scan is a walk over the keys of all masters. One step is one call of SCAN.
type scan struct {
	prefix, pattern string
	nodes           []redis.Cmdable // nil before the first step
	node            redis.Cmdable   // the one that the last step asked
	apart           bool            // a command must not name keys of several locks, as in a Cluster
	cursor          uint64
	begun, ended    bool
}

func newScan(prefix, pattern string) *scan { return &scan{prefix: prefix, pattern: pattern} }

func (s *scan) over() bool { return s.ended }

func (s *scan) step(ctx context.Context, rdb redis.UniversalClient) ([]string, error) {
	if !s.begun {
		nodes, err := masters(ctx, rdb)
		if err != nil {
			return nil, err
		}
		s.nodes, s.begun = nodes, true
		_, s.apart = rdb.(*redis.ClusterClient)
	}
	s.node = s.nodes[0]
	keys, cursor, err := s.node.Scan(ctx, s.cursor, globQuote(s.prefix)+s.pattern+helperKeys, scanCount).Result()
	if err != nil {
		return nil, err
	}
	if s.cursor = cursor; cursor == 0 {
		s.nodes = s.nodes[1:]
		s.ended = len(s.nodes) == 0
	}
	var names []string
	for _, key := range keys {
		if name, ok := lockOf(s.prefix, key); ok && globMatch(s.pattern, name) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// used returns, for each lock that the last step found, how many of its two keys exist, its own and its
// queue's: 0 if the lock is free, and 1 if the node does not say. Usually all are free, so it first asks
// about all of them at once. checks is how many it then asked about one by one.
func (s *scan) used(ctx context.Context, names []string) (counts []int64, checks int, err error) {
	if len(names) == 0 {
		return nil, 0, nil
	}
	counts = make([]int64, len(names))
	keys := make([]string, 0, 2*len(names))
	for _, name := range names {
		lock, err := protocol.NewKeys(s.prefix, name)
		if err != nil {
			return nil, 0, err
		}
		keys = append(keys, lock.Lock, lock.Queue())
	}
	if !s.apart {
		n, err := s.node.Exists(ctx, keys...).Result()
		if unanswered(err) || err == nil && n == 0 {
			return counts, 0, err
		}
		s.apart = err != nil // the keys are in several slots of a node that has all of them
	}
	var answers []*redis.IntCmd
	_, err = s.node.Pipelined(ctx, func(p redis.Pipeliner) error {
		for pair := range slices.Chunk(keys, 2) {
			answers = append(answers, p.Exists(ctx, pair...))
		}
		return nil
	})
	if unanswered(err) {
		return nil, 0, err
	}
	for i, answer := range answers {
		if counts[i], err = answer.Result(); err != nil {
			counts[i] = 1 // it is refused while the slot moves
		}
	}
	return counts, len(names), nil
}

// inUse returns which of the locks that the last step found are held or waited for, as far as the node says.
// Beside a service with a new lock name per request, nearly all are free.
func (s *scan) inUse(ctx context.Context, names []string) ([]string, error) {
	counts, _, err := s.used(ctx, names)
	if err != nil {
		return nil, err
	}
	found := names[:0]
	for i, name := range names {
		if counts[i] > 0 {
			found = append(found, name)
		}
	}
	return found, nil
}

// unanswered reports whether a command failed without an answer of Redis.
func unanswered(err error) bool { return err != nil && !errors.As(err, new(redis.Error)) }

// helperKeys is the end of a pattern for the keys that lockOf knows, and few others.
const helperKeys = ":*:[mq][eu]*[ae]"

// lockOf returns the lock whose last token or queue a key holds: the key is <key>:{<key>}:meta, or
// <key>::meta if the lock's key has a hash tag of its own, and likewise with queue.
func lockOf(prefix, key string) (name string, ok bool) {
	stem, ok := strings.CutSuffix(key, ":meta")
	if !ok {
		if stem, ok = strings.CutSuffix(key, ":queue"); !ok {
			return "", false
		}
	}
	lock, tagged := strings.CutSuffix(stem, ":")
	if !tagged {
		// <lock>:{<lock>} has an odd number of bytes, 2n+3.
		n := (len(stem) - 3) / 2
		if n < 1 {
			return "", false
		}
		lock = stem[:n]
	}
	if name, ok = strings.CutPrefix(lock, prefix); !ok {
		return "", false
	}
	keys, err := protocol.NewKeys(prefix, name)
	return name, err == nil && (keys.Meta() == key || keys.Queue() == key)
}
