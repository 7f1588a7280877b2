package main

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// partner has to know for whom a code is before the user may have it. The token identifies an
// activation: the same request may come twice, and ending one activation must not end the other.
// An activation that arrives after its end must be refused.
type partner interface {
	Activate(ctx context.Context, code, user string, token uint64) error
	Deactivate(ctx context.Context, code, user string, token uint64) error
}

// shop gives out coupons. Its state is in Redis, in practice on another server than the
// locks: a hash with the token, a list of free codes, and a hash that says under which token each of the
// others was given, and to whom.
type shop struct {
	locks   *leased.Client
	rdb     *redis.Client
	partner partner
	pause   func() time.Duration // between two tries
}

const (
	state = "{coupon}:state"
	free  = "{coupon}:free"
	given = "{coupon}:given"
)

var (
	errNoneLeft = errors.New("no coupon is left")
	errStale    = errors.New("another lease was here")
)

// grab gives a coupon to the user, or returns an error after which nothing of it is left, unless
// the error is also that of undoing what was done.
func (s *shop) grab(ctx context.Context, user string) (code string, err error) {
	lease, err := s.tryLock(ctx)
	if err != nil {
		return "", err
	}
	done := false
	defer func() {
		// Once the coupon is given it stays given, whatever became of the lease.
		if e := lease.Unlock(); !done {
			err = errors.Join(err, e)
		}
	}()
	work, cancel := lease.With(ctx) // ends with the request or with the lease
	defer cancel()

	code, err = s.next(work, lease.Token())
	if err != nil {
		return "", err
	}
	// The token tells this activation from any other, also one for the same user.
	if err = s.partner.Activate(work, code, user, lease.Token()); err == nil {
		err = s.give(work, lease.Token(), code, user)
	}
	if err != nil {
		// The lease was lost, the partner failed, or Redis did not answer.
		kept, undoing := s.rollBack(ctx, lease.Token(), code, user)
		if !kept {
			return "", errors.Join(err, undoing)
		}
	}
	done = true
	return code, nil
}

const tries = 5

// tryLock tries five times, with pauses in between. Where callers may wait, LockContext
// with a timeout is better: it queues, and does not poll.
func (s *shop) tryLock(ctx context.Context) (*leased.Lease, error) {
	for try := 1; ; try++ {
		lease, err := s.locks.Mutex("coupon").TryLockContext(ctx)
		if !errors.Is(err, leased.ErrLocked) || try == tries {
			return lease, err
		}
		select {
		case <-time.After(s.pause()):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// rollBack undoes what grab did, unless the coupon was given after all, which it reports: the
// answer to that command may have been lost. It works without the lock and after the end of
// the request: so it touches only what was done under this token.
func (s *shop) rollBack(ctx context.Context, token uint64, code, user string) (kept bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	kept, err = undoScript.Run(ctx, s.rdb, []string{state, given}, token, code, user).Bool()
	if err != nil || kept {
		return kept, err
	}
	return false, s.partner.Deactivate(ctx, code, user, token)
}

// next is the first access under a lease: it presents the token and reads.
func (s *shop) next(ctx context.Context, token uint64) (code string, err error) {
	answer, err := nextScript.Run(ctx, s.rdb, []string{state, free}, token).StringSlice()
	switch {
	case err != nil:
		return "", err
	case answer[0] == "stale":
		return "", errStale
	case len(answer) == 1:
		return "", errNoneLeft
	}
	return answer[1], nil
}

// give writes under that token only.
func (s *shop) give(ctx context.Context, token uint64, code, user string) error {
	ok, err := giveScript.Run(ctx, s.rdb, []string{state, free, given}, token, code, user).Bool()
	if err == nil && !ok {
		err = errStale
	}
	return err
}

var (
	nextScript = redis.NewScript(`
		local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
		if seen >= tonumber(ARGV[1]) then return {'stale'} end
		redis.call('HSET', KEYS[1], 'token', ARGV[1])
		return {'ok', redis.call('LINDEX', KEYS[2], 0) or nil}`)

	giveScript = redis.NewScript(`
		if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
		if tonumber(redis.call('HGET', KEYS[1], 'undone') or '0') >= tonumber(ARGV[1]) then return 0 end
		if redis.call('LINDEX', KEYS[2], 0) ~= ARGV[2] then return 0 end
		redis.call('LPOP', KEYS[2])
		redis.call('HSET', KEYS[3], ARGV[2], ARGV[1] .. ' ' .. ARGV[3])
		return 1`)

	// A give of the same lease that arrives after this one is refused, and so is one of an
	// earlier lease, whose token is no longer the stored one anyway.
	undoScript = redis.NewScript(`
		if redis.call('HGET', KEYS[2], ARGV[2]) == ARGV[1] .. ' ' .. ARGV[3] then return 1 end
		if tonumber(redis.call('HGET', KEYS[1], 'undone') or '0') < tonumber(ARGV[1]) then
			redis.call('HSET', KEYS[1], 'undone', ARGV[1])
		end
		return 0`)
)

// open puts new coupons in place of all there were.
func (s *shop) open(ctx context.Context, codes []string) error {
	_, err := s.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, state, free, given)
		for _, code := range codes {
			p.RPush(ctx, free, code)
		}
		return nil
	})
	return err
}
