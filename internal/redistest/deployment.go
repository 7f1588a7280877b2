package redistest

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Deployment is a place other than one plain server in which a behavior suite can run.
// All tests of a process share it, so no test may break it or flush it.
type Deployment struct {
	// Name is "cluster", "sentinel", "acl" or "tls".
	Name string
	// Addr is a node's address.
	Addr string
	// Admin returns a client without restrictions, closed in tb's cleanup.
	Admin func(tb testing.TB) redis.UniversalClient
	// Connect returns a client for the code under test, closed in tb's cleanup. The given
	// functions may change its options. If there are several servers, they may change only the
	// options in carried; Connect skips tb if they change what makes sense only for a connection
	// to a single server, and fails it if they change something else.
	Connect func(tb testing.TB, change ...func(*redis.Options)) redis.UniversalClient
	// prefix precedes the prefix that Prefix returns.
	prefix string
}

// Target returns what a test of a suite is given. Its Options and NewClient reach a single
// node, so they are of no use in a Cluster or behind an ACL; use Connect there.
func (d *Deployment) Target(tb testing.TB) Target {
	return Target{Name: d.Name, Real: true, Addr: d.Addr, Prefix: d.prefix + Prefix(tb), Deployment: d}
}

// deployments holds the deployments of the process. The mutex guards their start.
var deployments struct {
	sync.Mutex
	host  host
	named map[string]*Deployment
}

// Deployments returns the deployments listed, separated by commas, in the environment
// variable LEASED_SERVERS. By default there are none, because a suite takes its full time
// again on each. They are started on first use and ended by [Main]; if Main does not run
// the tests, Deployments returns none. The user of "acl" gets the given rights, which have
// the syntax of ACL SETUSER and include what go-redis itself needs. Names in known are
// skipped: the caller handles them itself.
func Deployments(tb testing.TB, known []string, rights ...string) []*Deployment {
	tb.Helper()
	names := os.Getenv("LEASED_SERVERS")
	if names == "" {
		return nil
	}
	common.Lock()
	inMain := common.inMain
	common.Unlock()
	if !inMain {
		return nil
	}
	deployments.Lock()
	defer deployments.Unlock()
	var all []*Deployment
	for name := range strings.SplitSeq(names, ",") {
		if slices.Contains(known, name) {
			continue
		}
		_ = need(tb)
		d := deployments.named[name]
		if d == nil {
			d = deploy(tb, name, rights)
			if deployments.named == nil {
				deployments.named = map[string]*Deployment{}
			}
			deployments.named[name] = d
		}
		all = append(all, d)
	}
	return all
}

func deploy(tb testing.TB, name string, rights []string) *Deployment {
	tb.Helper()
	host := &deployments.host
	switch name {
	case "cluster":
		c := NewCluster(host)
		connect := func(tb testing.TB, change ...func(*redis.Options)) redis.UniversalClient {
			return c.NewClient(tb, func(all *redis.ClusterOptions) { carry(tb, Options(c.Nodes[0].Addr), change, all) })
		}
		return &Deployment{Name: name, Addr: c.Nodes[0].Addr, Connect: connect,
			Admin: func(tb testing.TB) redis.UniversalClient { return connect(tb) }}
	case "sentinel":
		s := NewSentinels(host)
		connect := func(tb testing.TB, change ...func(*redis.Options)) redis.UniversalClient {
			all := s.FailoverOptions()
			carry(tb, Options(s.Nodes[0].Addr), change, all)
			rdb := redis.NewFailoverClient(all)
			tb.Cleanup(func() { _ = rdb.Close() })
			return rdb
		}
		return &Deployment{Name: name, Addr: s.Nodes[0].Addr, Connect: connect,
			Admin: func(tb testing.TB) redis.UniversalClient { return connect(tb) }}
	case "acl":
		const prefix = "acl/"
		in := Server(host)
		rules := []any{"ACL", "SETUSER", "app", "on", ">secret", "resetkeys", "resetchannels", "~" + prefix + "*", "&" + prefix + "*", "-@all"}
		for _, r := range rights {
			rules = append(rules, r)
		}
		in.mustAsk(rules...)
		return &Deployment{Name: name, Addr: in.Addr, prefix: prefix,
			Admin: func(tb testing.TB) redis.UniversalClient { return newClient(tb, in.Options(), nil) },
			Connect: func(tb testing.TB, change ...func(*redis.Options)) redis.UniversalClient {
				o := in.Options()
				o.Username, o.Password = "app", "secret"
				return newClient(tb, o, change)
			}}
	case "tls":
		in := TLSServer(host)
		connect := func(tb testing.TB, change ...func(*redis.Options)) redis.UniversalClient {
			return newClient(tb, in.Options(), change)
		}
		return &Deployment{Name: name, Addr: in.Addr, Connect: connect,
			Admin: func(tb testing.TB) redis.UniversalClient { return connect(tb) }}
	}
	tb.Fatalf("redistest: LEASED_SERVERS names %q: there are cluster, sentinel, acl and tls", name)
	return nil
}

var (
	// carried names the options that a client of several servers can take over from a client of one.
	carried = []string{"ContextTimeoutEnabled", "ReadTimeout", "PoolSize", "MaxRetries"}

	// ofOneServer names those that make no sense with several servers.
	ofOneServer = []string{"Addr", "Limiter", "Dialer"}
)

// carry applies the changes to the options of a client of one server, and carries them over to
// those of a client of several, a pointer to which is all.
func carry(tb testing.TB, one *redis.Options, change []func(*redis.Options), all any) {
	tb.Helper()
	before := *one
	for _, f := range change {
		f(one)
	}
	was, is, to := reflect.ValueOf(before), reflect.ValueOf(*one), reflect.ValueOf(all).Elem()
	for _, name := range ofOneServer {
		if !same(was.FieldByName(name), is.FieldByName(name)) {
			tb.Skip("redistest: about one server's connection")
			return
		}
	}
	for i := range is.NumField() {
		name := is.Type().Field(i).Name
		switch {
		case !is.Type().Field(i).IsExported(): // go-redis's own
		case slices.Contains(carried, name):
			to.FieldByName(name).Set(is.Field(i))
		case !same(was.Field(i), is.Field(i)):
			tb.Fatalf("redistest: the option %s is not carried over to several servers", name)
		}
	}
}

// same reports whether an option is unchanged. A function counts as another one only beside nil,
// because functions cannot be compared.
func same(a, b reflect.Value) bool {
	if a.Kind() == reflect.Func {
		return a.IsNil() == b.IsNil()
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

// host is the testing.TB of everything that the tests of a process share. A failure panics.
type host struct {
	testing.TB
	mu       sync.Mutex
	cleanups []func()
}

func (h *host) Helper()                      {}
func (h *host) Context() context.Context     { return context.Background() }
func (h *host) Name() string                 { return "redistest" }
func (h *host) Fatal(args ...any)            { panic(fmt.Sprint(args...)) }
func (h *host) Fatalf(text string, v ...any) { panic(fmt.Sprintf(text, v...)) }
func (h *host) Error(args ...any)            { panic(fmt.Sprint(args...)) }
func (h *host) Skip(args ...any)             { panic(fmt.Sprint(args...)) }

func (h *host) Cleanup(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cleanups = append(h.cleanups, f)
}

func (h *host) TempDir() string {
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (h *host) end() {
	h.mu.Lock()
	all := h.cleanups
	h.cleanups = nil
	h.mu.Unlock()
	for i := len(all) - 1; i >= 0; i-- {
		all[i]()
	}
}
