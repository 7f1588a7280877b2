package redisserver

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
)

// The tests of this package run single scripts through Server, without a client or the
// state machine. The rules that they name are those of docs/design.md, section 4.

// One real server serves all tests except those that change it.
func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

// scene is one lock on one server.
type scene struct {
	t    testing.TB
	real bool
	rdb  *redis.Client
	srv  *Server
	keys protocol.Keys
	made int // how many ids were made
}

// onScripts runs f on the embedded and on a real server.
func onScripts(t *testing.T, f func(t *testing.T, s *scene)) {
	t.Helper()
	redistest.OnBoth(t, func(t *testing.T, target redistest.Target) {
		rdb := target.NewClient(t)
		redistest.CheckLeaks(t, rdb, target.Prefix)
		s := newScene(t, rdb, target.Prefix, "x")
		s.real = target.Real
		f(t, s)
	})
}

// onOwnServer runs f on a real server that no other test uses.
func onOwnServer(t *testing.T, f func(t *testing.T, s *scene), args ...string) {
	t.Helper()
	rdb := redistest.Server(t, args...).Client()
	redistest.CheckLeaks(t, rdb, "")
	s := newScene(t, rdb, "", "x")
	s.real = true
	f(t, s)
}

func newScene(t *testing.T, rdb *redis.Client, prefix, name string) *scene {
	t.Helper()
	k, err := protocol.NewKeys(prefix, name)
	if err != nil {
		t.Fatal(err)
	}
	// A client gives up a command after 2 s and repeats it. These tests do not repeat, and
	// a machine under load may stop them for that long.
	patient := rdb.WithTimeout(30 * time.Second)
	patient.Options().ContextTimeoutEnabled = true
	return &scene{t: t, rdb: rdb, srv: New(patient, prefix), keys: k}
}

const long = 30 * time.Second // a TTL that does not end during a test

// inboxOf returns the full name of a client with a one-letter label, as in ids and channels.
func inboxOf(client string) string { return strings.Repeat(client, 16) + ":" + client }

// id makes a request whose client a count of 0 listeners does not prove gone.
func (s *scene) id(client string, m protocol.Mode, ttl time.Duration) string {
	s.made++
	return fmt.Sprintf("leased1:%c:%d:u:%016d:%s", m, ttl.Milliseconds(), s.made, inboxOf(client))
}

func (s *scene) writer(client string) string { return s.id(client, protocol.Exclusive, long) }
func (s *scene) reader(client string) string { return s.id(client, protocol.Shared, long) }

// counted turns id into one whose client a count of 0 listeners proves gone.
func counted(id string) string { return strings.Replace(id, ":u:", ":c:", 1) }

// provisional turns id into one whose client confirms a grant that it was notified of.
func provisional(id string) string { return strings.Replace(id, ":u:", ":p:", 1) }

// traced turns id into one that refers to a span and has the token of a downgrade.
func traced(id string) string {
	parts := strings.SplitN(id, ":", 6)
	parts[4] += "t0000000000zsAAECAwQFBgcICQoLDA0ODxAREhMUFRYX"
	return strings.Join(parts, ":")
}

// proved turns id into one with a random proof, traced or not.
func proved(rng *rand.Rand, id string) string {
	if rng.Intn(4) == 0 {
		id = traced(id)
	}
	switch rng.Intn(5) {
	case 0:
		return provisional(id)
	case 1, 2:
		return counted(id)
	}
	return id
}

// provisionalEnds reports whether so much time has passed since a step that a provisional grant made by
// it may have expired. Only a stalled machine is that slow.
func provisionalEnds(since time.Time) bool { return time.Since(since) > protocol.ProvisionalTTL/2 }

func ttlOf(t testing.TB, id string) time.Duration {
	t.Helper()
	who, err := protocol.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	return who.TTL
}

func (s *scene) do(c protocol.Command) (protocol.Answer, error) {
	return s.srv.Do(context.Background(), &s.keys, &c)
}

func (s *scene) must(a protocol.Answer, err error) protocol.Answer {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return a
}

func (s *scene) acquireOf(id string) protocol.Command {
	return protocol.Command{Verb: protocol.Acquire, ID: id, TTL: ttlOf(s.t, id), Wait: true}
}

// questionOf is the question of an owner whether others wait.
func (s *scene) questionOf(id string) protocol.Command {
	c := s.acquireOf(id)
	c.Wait, c.Question = false, true
	return c
}

// newcomer is the acquire of a request that was never sent.
func (s *scene) newcomer(id string) protocol.Command {
	c := s.acquireOf(id)
	c.First = true
	return c
}

// briefly is the brief re-check of id, which waits, and whose waiting lease is to end that many ms later.
func (s *scene) briefly(id string, later uint64) protocol.Command {
	c := s.acquireOf(id)
	c.Waits = uint64(s.look().waiters[id])
	c.Until = c.Waits + later
	return c
}

func (s *scene) acquire(id string) protocol.Answer {
	s.t.Helper()
	return s.must(s.do(s.acquireOf(id)))
}

func (s *scene) try(id string) protocol.Answer {
	s.t.Helper()
	c := s.acquireOf(id)
	c.Wait = false
	return s.must(s.do(c))
}

func (s *scene) release(id string, last uint64) protocol.Answer {
	s.t.Helper()
	return s.must(s.do(protocol.Command{Verb: protocol.Release, ID: id, Last: last}))
}

func (s *scene) yield(old, next string, last uint64) protocol.Answer {
	s.t.Helper()
	return s.must(s.do(protocol.Command{Verb: protocol.Yield, ID: old, Next: next, Last: last}))
}

func (s *scene) downgrade(old, next string, last uint64) protocol.Answer {
	s.t.Helper()
	return s.must(s.do(protocol.Command{Verb: protocol.Downgrade, ID: old, Next: next, Last: last}))
}

func (s *scene) renewal(id string) protocol.Renewal {
	s.t.Helper()
	req, err := protocol.RequestOf(id)
	if err != nil {
		s.t.Fatal(err)
	}
	batch := []protocol.Renewal{{Keys: &s.keys, Req: req}}
	s.srv.Renew(context.Background(), batch)
	return batch[0]
}

// renew reports whether id still owned the lock.
func (s *scene) renew(id string) bool {
	s.t.Helper()
	r := s.renewal(id)
	if r.Err != nil {
		s.t.Fatal(r.Err)
	}
	return r.Outcome == protocol.Granted
}

func (s *scene) tryCancel(id string, last uint64, cool time.Duration) error {
	if fail := s.srv.Cancel(context.Background(), []protocol.CancelRequest{{ID: id, Keys: &s.keys, Last: last, Cooldown: cool}})[0].Fail; fail != nil {
		return fail.Err
	}
	return nil
}

func (s *scene) cancel(id string, last uint64) {
	s.t.Helper()
	if err := s.tryCancel(id, last, 0); err != nil {
		s.t.Fatal(err)
	}
}

// answerOf cancels id and returns the result.
func (s *scene) answerOf(id string, last uint64) protocol.Canceled {
	s.t.Helper()
	r := s.srv.Cancel(context.Background(), []protocol.CancelRequest{{ID: id, Keys: &s.keys, Last: last}})[0]
	if r.Fail != nil {
		s.t.Fatal(r.Fail.Err)
	}
	return r
}

func (s *scene) evict() []string {
	s.t.Helper()
	owners, err := s.srv.evict(context.Background(), &s.keys, "", "")
	if err != nil {
		s.t.Fatal(err)
	}
	return owners
}

// raw sends a single command, such as a foreign client could.
func (s *scene) raw(args ...any) any {
	s.t.Helper()
	v, err := s.rdb.Do(context.Background(), args...).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.t.Fatalf("%v: %v", args, err)
	}
	return v
}

// now returns the server's clock in ms.
func (s *scene) now() int64 {
	s.t.Helper()
	now, err := s.rdb.Time(context.Background()).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	return now.UnixMilli()
}

// dies ends a waiter's lease now, as if it had crashed a TTL ago.
func (s *scene) dies(id string) { s.raw("ZADD", s.keys.Waiters(), "XX", s.now()-1, id) }

// crowd adds n writers to the end of the queue, whose waiting leases end then.
func (s *scene) crowd(n int, ends int64) (ids []string) {
	queue, waiters := []any{"ZADD", s.keys.Queue()}, []any{"ZADD", s.keys.Waiters()}
	for i := range n {
		id := s.writer("W")
		ids = append(ids, id)
		queue, waiters = append(queue, 1000+i, id), append(waiters, ends, id)
	}
	s.raw(queue...)
	s.raw(waiters...)
	s.raw("PEXPIRE", s.keys.Queue(), 600_000)
	s.raw("PEXPIRE", s.keys.Waiters(), 600_000)
	return ids
}

// readsFor makes the reader id an owner whose lease ends ms from now.
func (s *scene) readsFor(id string, ms int64) {
	s.t.Helper()
	s.gets(s.acquire(id))
	s.raw("ZADD", s.keys.Readers(), "XX", s.now()+ms, id)
}

// clear deletes all keys of the lock, its last token included.
func (s *scene) clear() {
	s.raw("DEL", s.keys.Lock, s.keys.Queue(), s.keys.Readers(), s.keys.Waiters(), s.keys.Meta())
}

// gets fails the test unless a grants the lock, and returns the token.
func (s *scene) gets(a protocol.Answer) uint64 {
	s.t.Helper()
	if a.Outcome != protocol.Granted || a.Token == 0 || a.Clock == 0 {
		s.t.Fatalf("not granted: %+v", a)
	}
	return a.Token
}

// waits fails the test unless a says that the request waits at this place.
func (s *scene) waits(a protocol.Answer, place int) protocol.Answer {
	s.t.Helper()
	if a.Outcome != protocol.Enqueued || a.Place != place {
		s.t.Fatalf("want queued at place %d: %+v", place, a)
	}
	return a
}

// is fails the test unless a has this outcome.
func (s *scene) is(a protocol.Answer, want protocol.Outcome) {
	s.t.Helper()
	if a.Outcome != want {
		s.t.Fatalf("outcome %d, want %d: %+v", a.Outcome, want, a)
	}
}

// owned fails the test unless exactly these ids own the lock: one writer or some readers.
func (s *scene) owned(ids ...string) {
	s.t.Helper()
	st := s.look()
	var owners []string
	switch {
	case st.value == protocol.MarkerValue:
		for id, ends := range st.readers {
			if ends > st.clock {
				owners = append(owners, id)
			}
		}
	case st.value != "":
		owners = []string{st.value}
	}
	slices.Sort(owners)
	slices.Sort(ids)
	if !slices.Equal(owners, ids) {
		s.t.Fatalf("owned by %q, want %q; value %q, readers %v", owners, ids, st.value, st.readers)
	}
}

// queued fails the test unless ids wait, in this order.
func (s *scene) queued(ids ...string) {
	s.t.Helper()
	if st := s.look(); !slices.Equal(st.queue, ids) {
		s.t.Fatalf("queue %q, want %q", st.queue, ids)
	}
}

// listener receives what is published to one client's inbox.
type listener struct {
	s       *scene
	sub     *redis.PubSub
	channel string
	ends    int
}

func (s *scene) listen(client string) *listener {
	s.t.Helper()
	l := &listener{s: s, channel: s.srv.Inboxes + inboxOf(client)}
	l.sub = s.rdb.Subscribe(context.Background(), l.channel)
	if _, err := l.sub.Receive(context.Background()); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { l.sub.Close() })
	return l
}

// received returns what was published since the last call. It publishes a message and
// returns those that arrive before it.
func (l *listener) received() []protocol.Message {
	l.s.t.Helper()
	l.ends++
	end := "end " + strconv.Itoa(l.ends)
	l.s.raw("PUBLISH", l.channel, end)
	var all []protocol.Message
	for {
		msg, err := l.sub.ReceiveMessage(context.Background())
		if err != nil {
			l.s.t.Fatal(err)
		}
		if msg.Payload == end {
			return all
		}
		m, ok := protocol.ParseMessage(msg.Payload)
		if !ok {
			l.s.t.Fatalf("malformed message %q", msg.Payload)
		}
		all = append(all, m)
	}
}

// receives fails the test unless exactly messages of these kinds arrived, all about id.
func (l *listener) receives(id string, kinds ...protocol.MessageKind) []protocol.Message {
	l.s.t.Helper()
	all := l.received()
	var got []protocol.MessageKind
	for _, m := range all {
		got = append(got, m.Kind)
		if m.ID != id || m.Key != l.s.keys.Lock {
			l.s.t.Fatalf("a message about %q of %q, want %q", m.ID, m.Key, id)
		}
	}
	if !slices.Equal(got, kinds) {
		l.s.t.Fatalf("received %q, want %q", got, kinds)
	}
	return all
}

func clientOf(t *testing.T, addr string) *redis.Client {
	t.Helper()
	rdb := redis.NewClient(redistest.Options(addr))
	t.Cleanup(func() { rdb.Close() })
	return rdb
}

func TestTheIDsOfTestsAreOnesThatClientsMake(t *testing.T) {
	var s scene
	if who, err := protocol.ParseID(traced(s.writer("A"))); err != nil || !who.Origin.Span.Valid() || who.Origin.Token != 35 {
		t.Errorf("%+v, %v", who, err)
	}
}
