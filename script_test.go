package leased

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/redistest"
)

// The tests in script_*_test.go run single scripts by hand, through redisServer
// and nothing else of ours: no client, no state machine. Rules are those of
// docs/design.md, section 4.

// scene is one lock on one server.
type scene struct {
	t    testing.TB
	real bool
	rdb  *redis.Client
	srv  *redisServer
	keys keys
	made int // ids so far
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

// onOwnServer runs f on a real server that nobody else uses.
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
	k, err := newKeys(prefix, name)
	if err != nil {
		t.Fatal(err)
	}
	// A client gives a command up after 2 s, and asks again. Here nobody would, and a
	// machine under load may stop us for as long.
	patient := rdb.WithTimeout(30 * time.Second)
	patient.Options().ContextTimeoutEnabled = true
	return &scene{t: t, rdb: rdb, srv: newRedisServer(patient, prefix), keys: k}
}

const long = 30 * time.Second // a TTL that does not end during a test

// inboxOf is what ids and inbox channels call the client with a one-letter name.
func inboxOf(client string) string { return strings.Repeat(client, 16) + ":" + client }

// id makes a request whose asker cannot be proved gone by PUBLISH's count.
func (s *scene) id(client string, m mode, ttl time.Duration) string {
	s.made++
	return fmt.Sprintf("leased1:%c:%d:u:%016d:%s", m, ttl.Milliseconds(), s.made, inboxOf(client))
}

func (s *scene) writer(client string) string { return s.id(client, exclusive, long) }
func (s *scene) reader(client string) string { return s.id(client, shared, long) }

// counted is the id of an asker for whom a count of 0 is proof.
func counted(id string) string { return strings.Replace(id, ":u:", ":c:", 1) }

func ttlOf(t testing.TB, id string) time.Duration {
	t.Helper()
	who, err := parseID(id)
	if err != nil {
		t.Fatal(err)
	}
	return who.ttl
}

func (s *scene) do(c command) (answer, error) { return s.srv.do(context.Background(), &s.keys, &c) }

func (s *scene) must(a answer, err error) answer {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return a
}

func (s *scene) acquireOf(id string) command {
	return command{verb: acquire, id: id, ttl: ttlOf(s.t, id), wait: true}
}

func (s *scene) acquire(id string) answer { s.t.Helper(); return s.must(s.do(s.acquireOf(id))) }

func (s *scene) try(id string) answer {
	s.t.Helper()
	c := s.acquireOf(id)
	c.wait = false
	return s.must(s.do(c))
}

func (s *scene) release(id string, last uint64) answer {
	s.t.Helper()
	return s.must(s.do(command{verb: release, id: id, last: last}))
}

func (s *scene) yield(old, next string, last uint64) answer {
	s.t.Helper()
	return s.must(s.do(command{verb: yield, id: old, next: next, last: last}))
}

func (s *scene) renewal(id string) renewal {
	s.t.Helper()
	req, err := requestOf(id)
	if err != nil {
		s.t.Fatal(err)
	}
	batch := []renewal{{entry: &entry{keys: s.keys}, req: req}}
	s.srv.renew(context.Background(), batch)
	return batch[0]
}

// renew reports whether id still owned the lock.
func (s *scene) renew(id string) bool {
	s.t.Helper()
	r := s.renewal(id)
	if r.err != nil {
		s.t.Fatal(r.err)
	}
	return r.outcome == granted
}

func (s *scene) tryCancel(id string, last uint64) error {
	if fail := s.srv.cancel(context.Background(), []*ghost{{id: id, keys: &s.keys, last: last}})[0].fail; fail != nil {
		return fail.err
	}
	return nil
}

func (s *scene) cancel(id string, last uint64) {
	s.t.Helper()
	if err := s.tryCancel(id, last); err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) evict() []string {
	s.t.Helper()
	owners, err := s.srv.evict(context.Background(), &s.keys)
	if err != nil {
		s.t.Fatal(err)
	}
	return owners
}

// raw sends one command that no script of ours would.
func (s *scene) raw(args ...any) any {
	s.t.Helper()
	v, err := s.rdb.Do(context.Background(), args...).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.t.Fatalf("%v: %v", args, err)
	}
	return v
}

// now is the server's clock, in ms.
func (s *scene) now() int64 {
	s.t.Helper()
	now, err := s.rdb.Time(context.Background()).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	return now.UnixMilli()
}

// dies lets a waiter's lease end now: it crashed a TTL ago.
func (s *scene) dies(id string) { s.raw("ZADD", s.keys.waiters(), "XX", s.now()-1, id) }

// clear forgets the lock, its last token too.
func (s *scene) clear() {
	s.raw("DEL", s.keys.lock, s.keys.queue(), s.keys.readers(), s.keys.waiters(), s.keys.meta())
}

// gets fails the test unless a says that the lock was granted.
func (s *scene) gets(a answer) uint64 {
	s.t.Helper()
	if a.outcome != granted || a.token == 0 || a.clock == 0 {
		s.t.Fatalf("not granted: %+v", a)
	}
	return a.token
}

// waits fails the test unless a says that place requests are before the asker.
func (s *scene) waits(a answer, place int) answer {
	s.t.Helper()
	if a.outcome != enqueued || a.place != place {
		s.t.Fatalf("want queued at place %d: %+v", place, a)
	}
	return a
}

// is fails the test unless got is what a said.
func (s *scene) is(a answer, want outcome) {
	s.t.Helper()
	if a.outcome != want {
		s.t.Fatalf("outcome %d, want %d: %+v", a.outcome, want, a)
	}
}

// owned fails the test unless exactly ids own the lock: one writer or some readers.
func (s *scene) owned(ids ...string) {
	s.t.Helper()
	st := s.look()
	var owners []string
	switch {
	case st.value == markerValue:
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

// listener hears what is published to one client's inbox.
type listener struct {
	s       *scene
	sub     *redis.PubSub
	channel string
	ends    int
}

func (s *scene) listen(client string) *listener {
	s.t.Helper()
	l := &listener{s: s, channel: s.srv.inboxes + inboxOf(client)}
	l.sub = s.rdb.Subscribe(context.Background(), l.channel)
	if _, err := l.sub.Receive(context.Background()); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { l.sub.Close() })
	return l
}

// heard returns what was published since it was last asked. A message of its own
// comes after all others.
func (l *listener) heard() []message {
	l.s.t.Helper()
	l.ends++
	end := "end " + strconv.Itoa(l.ends)
	l.s.raw("PUBLISH", l.channel, end)
	var all []message
	for {
		msg, err := l.sub.ReceiveMessage(context.Background())
		if err != nil {
			l.s.t.Fatal(err)
		}
		if msg.Payload == end {
			return all
		}
		m, ok := parseMessage(msg.Payload)
		if !ok {
			l.s.t.Fatalf("malformed message %q", msg.Payload)
		}
		all = append(all, m)
	}
}

// hears fails the test unless exactly these kinds of messages came, about id.
func (l *listener) hears(id string, kinds ...string) []message {
	l.s.t.Helper()
	all := l.heard()
	var got []string
	for _, m := range all {
		got = append(got, m.kind)
		if m.id != id || m.key != l.s.keys.lock {
			l.s.t.Fatalf("a message about %q of %q, want %q", m.id, m.key, id)
		}
	}
	if !slices.Equal(got, kinds) {
		l.s.t.Fatalf("heard %q, want %q", got, kinds)
	}
	return all
}

func clientOf(t *testing.T, addr string) *redis.Client {
	t.Helper()
	rdb := redis.NewClient(redistest.Options(addr))
	t.Cleanup(func() { rdb.Close() })
	return rdb
}
