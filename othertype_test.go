package leased_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// hash has another program keep a hash under a lock's name, as Redisson's locks do.
func (s place) hash(t *testing.T, name string) {
	t.Helper()
	ctx := context.Background()
	must(t, s.rdb.Del(ctx, s.Prefix+name).Err())
	must(t, s.rdb.HSet(ctx, s.Prefix+name, "owner", 1).Err())
	must(t, s.rdb.PExpire(ctx, s.Prefix+name, time.Minute).Err())
}

// saysSo fails unless err says in words what is the matter, and still matches Redis'.
func saysSo(t *testing.T, err error) {
	t.Helper()
	var answer redis.Error
	if err == nil || !strings.Contains(err.Error(), "another program, such as Redisson, uses this name") || !errors.As(err, &answer) {
		t.Errorf("%v", err)
	}
}

func TestUnlockAfterAKeyOfAnotherTypeTookTheLocksIsALossAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c := newClient(t, s, leased.WithReleaseTimeout(time.Minute), leased.WithLossHandler(func(leased.LossEvent) {}))
		for how, acquire := range map[string]func(context.Context) (*leased.Lease, error){
			"a writer": c.RWMutex("x").LockContext, "a reader": c.RWMutex("x").RLockContext,
		} {
			l := take(t, acquire)
			s.hash(t, "x")
			err := l.Unlock()
			isAll(t, err, leased.ErrLeaseLost)
			if errors.Is(err, leased.ErrNotReleased) {
				t.Errorf("%s: %v", how, err)
			}
			if s.rdb.HGet(context.Background(), s.Prefix+"x", "owner").Val() != "1" {
				t.Errorf("%s: the other program's key is gone", how)
			}
			must(t, s.rdb.Del(context.Background(), s.Prefix+"x").Err())
		}
	})
}

// The release had no answer.
func TestAnUnlockWithoutAnswerBesideAKeyOfAnotherTypeIsALoss(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		c, h := onLosing(t, s, leased.WithReleaseTimeout(time.Minute), leased.WithLossHandler(func(leased.LossEvent) {}))
		l := lock(t, c.Mutex("x"))
		s.hash(t, "x")
		h.commands = 1
		isAll(t, l.Unlock(), leased.ErrLeaseLost)
		must(t, s.rdb.Del(context.Background(), s.Prefix+"x").Err())
	})
}

func TestAKeyOfAnotherTypeIsSpokenOfInWordsAndLeftAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, s place) {
		var out logs
		c := clientOn(t, s, s.connect(t), out.option())
		s.hash(t, "x")
		ctx := context.Background()
		_, err := c.Mutex("x").LockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired)
		saysSo(t, err)
		_, err = c.Mutex("x").TryLockContext(ctx)
		isAll(t, err, leased.ErrNotAcquired)
		saysSo(t, err)
		_, err = c.Inspect(ctx, "x")
		saysSo(t, err)
		saysSo(t, c.ForceUnlock(ctx, "x"))
		if s.rdb.HGet(ctx, s.Prefix+"x", "owner").Val() != "1" {
			t.Error("the other program's key is gone")
		}
		if n := out.count(slog.LevelError, "another type of value"); n != 1 {
			t.Errorf("logged %q", out.messages())
		}
		must(t, s.rdb.Del(ctx, s.Prefix+"x").Err())
	})
}
