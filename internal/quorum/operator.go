package quorum

// What an operator asks of all servers at once: Inspect and ForceUnlock.

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// Inspect returns what the servers together know of the lock; see Merged. It returns an error that matches
// ErrNoQuorum if fewer than a majority answer.
func (s *Server) Inspect(ctx context.Context, k *protocol.Keys) (protocol.Snapshot, error) {
	seen, failed := each(ctx, s, isMost[protocol.Snapshot](s), func(ctx context.Context, _ int, srv *redisserver.Server) (protocol.Snapshot, error) {
		return srv.Inspect(ctx, k)
	})
	if len(seen) < s.cfg.need() {
		return protocol.Snapshot{}, s.lacking(len(seen), failed)
	}
	return Merged(seen, s.cfg.N), nil
}

// Evict ends the ownership of the lock and notifies its owners. It returns on how many servers there was
// one, as far as they have answered by then, or 0 if no script evicted anybody. The next owner's token is
// above all that the evicted owner can have. It returns an error that matches ErrNoQuorum if fewer than a
// majority answer; the owner may be evicted on some of them all the same.
//
// If one client owns a majority, only that client is evicted: not one that owns a few other servers, and
// not the next owner, which enters when the evicted one gives back its remaining grants (unless the evicted
// one is a foreign client with an empty value, which cannot be asked for). Then servers that
// did not have that owner do not count: they may grant it a request that is under way to them.
func (s *Server) Evict(ctx context.Context, k *protocol.Keys) (on int, err error) {
	shown := make([]atomic.Pointer[protocol.Snapshot], len(s.members))
	seen, failed := each(ctx, s, isMost[protocol.Snapshot](s), func(ctx context.Context, i int, srv *redisserver.Server) (protocol.Snapshot, error) {
		sn, err := srv.Inspect(ctx, k)
		if err == nil {
			shown[i].Store(&sn)
		}
		return sn, err
	})
	if len(seen) < s.cfg.need() {
		return 0, s.lacking(len(seen), failed)
	}
	least, owned := uint64(0), false
	for i := range seen {
		least = max(least, Greatest(&seen[i]))
		owned = owned || seen[i].Value != ""
	}
	if !owned { // nobody has to be superseded, and nothing must be stored for a free lock
		least = 0
	}
	most := Merged(slices.Clone(seen), s.cfg.N)
	owner, ownsMost, enough := OwnerOf(&most), most.Behind >= s.cfg.need(), isMost[bool](s)
	if ownsMost {
		enough = func(evicted []bool) bool { return countTrue(evicted) >= s.cfg.need() }
	}
	var found atomic.Bool // whether a script evicted somebody: the owner may have unlocked since it was seen
	evicted, failed := each(ctx, s, enough, func(ctx context.Context, i int, srv *redisserver.Server) (had bool, err error) {
		sn := shown[i].Load()
		if sn == nil && ownsMost { // it was too slow, so it may have another owner
			one, err := srv.Inspect(ctx, k)
			if err != nil {
				return false, err
			}
			sn = &one
		}
		switch {
		case !ownsMost:
			ids, err := srv.EvictOwner(ctx, k, least, "")
			if len(ids) > 0 {
				found.Store(true)
			}
			return len(ids) > 0, err
		case OwnerOf(sn) != owner:
			return false, nil
		}
		gone, err := evictOwner(ctx, srv, k, least, sn.Value, owner)
		if gone {
			found.Store(true)
		}
		return true, err
	})
	if !enough(evicted) {
		return 0, fmt.Errorf("evicted on %d of %d servers: %w", countTrue(evicted), s.cfg.N, s.lacking(len(evicted), failed))
	}
	if !found.Load() {
		return 0, nil
	}
	return countTrue(evicted), nil // an owner that was evicted on one server may be quicker to give back the others itself
}

// evictOwner evicts a client from a server on which it owned the lock under this value, and reports whether it
// still did. The client may have given the lock back there since, or keep it under another value.
func evictOwner(ctx context.Context, srv *redisserver.Server, k *protocol.Keys, least uint64, value, client string) (bool, error) {
	if value == protocol.EmptyValue {
		value = "" // the script cannot ask for this one, and evicts any
	}
	ids, err := srv.EvictOwner(ctx, k, least, value)
	if len(ids) > 0 || err != nil {
		return len(ids) > 0, err
	}
	now, err := srv.Inspect(ctx, k)
	if err == nil && GoesOn(&now, client) {
		ids, err = srv.EvictOwner(ctx, k, least, now.Value)
	}
	return len(ids) > 0, err
}

// each runs f for all servers at once, except those that are away, and returns the results so far as
// soon as one of these holds: all calls have returned; minPatience is over, and the results are enough;
// a further protocol.CommandTimeout is over, after which only a blocking hook of the Redis client can keep
// a call; ctx has ended.
func each[T any](ctx context.Context, s *Server, enough func([]T) bool, f func(ctx context.Context, server int, srv *redisserver.Server) (T, error)) (results []T, failed []serverError) {
	if ctx.Err() != nil {
		return nil, []serverError{{noServer, ctx.Err()}}
	}
	replies, n, failed := askAll(s, f)
	timer := time.NewTimer(minPatience)
	defer timer.Stop()
	over := false
	for got := 0; got < n && !(over && enough(results)); {
		select {
		case o := <-replies:
			got++
			if o.err != nil {
				failed = append(failed, serverError{o.server, o.err})
			} else {
				results = append(results, o.val)
			}
		case <-timer.C:
			if over {
				return results, append(failed, serverError{noServer, errAway})
			}
			over = true
			timer.Reset(protocol.CommandTimeout)
		case <-ctx.Done():
			return results, append(failed, serverError{noServer, ctx.Err()})
		}
	}
	return results, failed
}

// reply is what a function returned for one server.
type reply[T any] struct {
	server int
	val    T
	err    error
}

// askAll starts calls of f for all servers except those that are away. It returns a channel that receives
// the outcome of each call, how many calls there are, and why the other servers have none. The goroutines
// are owned by the client, and waited for by Shutdown. The contexts of the calls, which are not the caller's,
// end after protocol.CommandTimeout or with the client.
func askAll[T any](s *Server, f func(ctx context.Context, server int, srv *redisserver.Server) (T, error)) (replies <-chan reply[T], n int, failed []serverError) {
	ch := make(chan reply[T], len(s.members))
	for i, m := range s.members {
		if m.isAway() {
			failed = append(failed, serverError{i, m.whyAway()})
			continue
		}
		if s.start(func() {
			ctx, cancel := context.WithTimeout(s.base, protocol.CommandTimeout)
			defer cancel()
			m.sending()
			sent := time.Now()
			of, fail := reply[T]{server: i, err: panicked.Err}, panicked
			defer func() { // even if a hook panics
				m.heardOf(fail, sent)
				ch <- of
			}()
			of.val, of.err = f(ctx, i, m.srv)
			fail = redisserver.Classify(of.err)
			if of.err != nil && s.base.Err() != nil { // not the caller's context, which may go on
				of.err = protocol.ErrClosed
			}
		}) {
			n++
		} else {
			failed = append(failed, serverError{i, protocol.ErrClosed})
		}
	}
	return ch, n, failed
}

// isMost returns a function that reports whether there are results of a majority.
func isMost[T any](s *Server) func([]T) bool {
	return func(results []T) bool { return len(results) >= s.cfg.need() }
}

func countTrue(all []bool) (n int) {
	for _, is := range all {
		if is {
			n++
		}
	}
	return n
}

// lacking returns an error that says that only this many servers answered, which is too few for a majority.
// failed are the others. If no majority can be had because servers refuse, its kind is that of
// a refusal; and if too many Redis clients are closed, it is that.
func (s *Server) lacking(answered int, failed []serverError) error {
	e := &noQuorum{answered: answered, n: s.cfg.N, need: s.cfg.need(), why: failed, kind: protocol.NoAnswer}
	closed := 0
	for _, r := range failed {
		switch f := redisserver.Classify(r.err); {
		case f.Kind == protocol.ClientClosed:
			closed++
		case (f.Lasts() || f.Kind == protocol.RefusedNow) && s.cfg.tooMany(len(failed)):
			e.kind = f.Kind
		}
	}
	if s.cfg.tooMany(closed) {
		e.kind = protocol.ClientClosed
	}
	return e
}
