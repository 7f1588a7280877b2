package leased_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// Types of the user's around a Redis client, and policies that run out.

type wrapsNode struct{ *redis.Client }

type wrapsAny struct{ redis.UniversalClient }

type wrapsRing struct{ *redis.Ring }

func TestATypeAroundARedisClientKeepsProofAndDeadlinesOrThatIsLogged(t *testing.T) {
	for what, c := range map[string]struct {
		wrap   func(*redis.Client) redis.UniversalClient
		bounds bool // ContextTimeoutEnabled
		flag   string
		logged int
	}{
		"a node's":                       {func(c *redis.Client) redis.UniversalClient { return wrapsNode{c} }, true, ":c:", 0},
		"a node's that ignores contexts": {func(c *redis.Client) redis.UniversalClient { return wrapsNode{c} }, false, ":c:", 1},
		"one of which nothing is known":  {func(c *redis.Client) redis.UniversalClient { return wrapsAny{c} }, true, ":u:", 1},
	} {
		t.Run(what, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T, s place) {
				var out logs
				rdb := s.connect(t, func(o *redis.Options) { o.ContextTimeoutEnabled = c.bounds })
				client := clientOn(t, s, c.wrap(rdb), out.option())
				unlock(t, lock(t, client.Mutex("warm")))
				synctest.Wait()
				l := lock(t, client.Mutex("x"))
				if id := s.value(t, "x"); !strings.Contains(id, c.flag) {
					t.Errorf("the id %q does not say %q", id, c.flag)
				}
				unlock(t, l)
				if n := out.count(slog.LevelWarn, "bounded"); n != c.logged {
					t.Errorf("logged %d times: %q", n, out.messages())
				}
			})
		})
	}
}

func TestATypeAroundARingIsRefused(t *testing.T) {
	if _, err := leased.New(wrapsRing{redis.NewRing(&redis.RingOptions{})}); err == nil {
		t.Error("accepted")
	}
}

func TestAKeyPrefixMayBeginAHashTagThatNamesEnd(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		for prefix, name := range map[string]string{"{app}:": "x", "{app:": "x}", "app{": "x}y"} {
			unlock(t, lock(t, newClient(t, s, leased.WithKeyPrefix(prefix)).Mutex(name)))
		}
	})
}

func TestAPolicyThatIsMissingLaterIsLoggedAndReplaced(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var out logs
		made := 0
		c := newClient(t, s, out.option(), leased.WithBackOff(func() leased.BackOff {
			if made++; made > 1 {
				return nil
			}
			return leisurely{}
		}))
		s.Mini.SetError("LOADING Redis is loading")
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if _, err := c.Mutex("x").LockContext(ctx); err == nil {
			t.Error("there is no Redis")
		}
		s.Mini.SetError("")
		if n := out.count(slog.LevelError, "factory returned nil"); n != 1 {
			t.Errorf("logged %d times: %q", n, out.messages())
		}
	})
}
