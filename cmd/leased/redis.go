package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// quietRedis keeps go-redis from writing its own log lines between ours. What matters is
// returned as errors.
func quietRedis() { redis.SetLogger(silence{}) }

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// connect returns a client for the server at rawURL, after the server has answered.
func connect(ctx context.Context, rawURL string) (*redis.Client, error) {
	options, err := redis.ParseURL(rawURL)
	if err != nil {
		// net/url's error repeats the whole URL, which may contain a password.
		var quoted *url.Error
		if errors.As(err, &quoted) {
			err = quoted.Err
		}
		return nil, usagef("--redis is no Redis URL such as redis://localhost:6379/0: %v", err)
	}
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	options.DialerRetries = 1 // report a missing server soon
	rdb := redis.NewClient(options)
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := rdb.Ping(ctx).Err(); err != nil {
		rdb.Close()
		return nil, fmt.Errorf("no Redis at %s: %w", options.Addr, err)
	}
	return rdb, nil
}
