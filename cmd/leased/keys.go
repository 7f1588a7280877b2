package main

import (
	"context"
	"crypto/rand"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
)

// lockKeys returns all keys that a lock can have, or none if its name is not valid.
func lockKeys(prefix, name string) []string {
	lock, err := protocol.NewKeys(prefix, name)
	if err != nil {
		return nil
	}
	var all []string
	for _, key := range lock.All() {
		all = append(all, key.(string))
	}
	return all
}

// randomName returns a name that nobody else has, for what a command makes for itself.
func randomName() string { return strings.ToLower(rand.Text()[:12]) }

// deleteKeys deletes what a command has made for itself, also if it was interrupted, and returns the
// first error. It deletes the keys one by one: a node of a Cluster refuses to delete several at once.
func deleteKeys(ctx context.Context, rdb redis.UniversalClient, keys []string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	var first error
	for _, key := range keys {
		if err := rdb.Del(ctx, key).Err(); first == nil {
			first = err
		}
	}
	return first
}
