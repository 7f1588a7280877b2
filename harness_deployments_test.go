package leased_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/leasedtest"
)

// inMemory is the server of package leasedtest. Each test has one of its own.
const inMemory = "leasedtest"

// onDeployments runs f wherever LEASED_SERVERS says:
// LEASED_SERVERS=cluster,sentinel,acl,tls,leasedtest.
func onDeployments(t *testing.T, f func(t *testing.T, s place)) {
	t.Helper()
	if wantsQuorum() {
		t.Run("quorum", func(t *testing.T) {
			f(t, quorumPlace(t, false))
		})
	}
	if slices.Contains(strings.Split(os.Getenv("LEASED_SERVERS"), ","), inMemory) {
		t.Run(inMemory, func(t *testing.T) {
			server := leasedtest.NewServer(t)
			d := &redistest.Deployment{
				Name:  inMemory,
				Admin: func(testing.TB) redis.UniversalClient { return server.Redis() },
				Connect: func(tb testing.TB, change ...func(*redis.Options)) redis.UniversalClient {
					return connectInMemory(tb, server, change)
				},
			}
			s := place{Target: redistest.Target{Name: inMemory, Addr: "in memory", Prefix: redistest.Prefix(t), Deployment: d}, rdb: d.Admin(t)}
			redistest.CheckLeaks(t, s.rdb, s.Prefix)
			f(t, s)
		})
	}
	for _, d := range redistest.Deployments(t, []string{inMemory, "quorum"}, leastRights(t)...) {
		t.Run(d.Name, func(t *testing.T) {
			s := place{Target: d.Target(t), rdb: d.Admin(t)}
			redistest.CheckLeaks(t, s.rdb, s.Prefix)
			f(t, s)
		})
	}
}

// connectInMemory returns a client like those of server.Redis, with options changed as
// told. It skips tb if the change leads through a proxy: there is no network.
func connectInMemory(tb testing.TB, server *leasedtest.Server, change []func(*redis.Options)) redis.UniversalClient {
	tb.Helper()
	o := *server.Redis().Options()
	addr := o.Addr
	for _, f := range change {
		f(&o)
	}
	if o.Addr != addr {
		tb.Skip("about a network")
	}
	rdb := redis.NewClient(&o)
	tb.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// universal returns what connects a client of the library to wherever the test runs.
func (s place) universal(t *testing.T) redis.UniversalClient {
	t.Helper()
	if s.Deployment != nil {
		return s.Deployment.Connect(t)
	}
	return s.connect(t)
}

// leastRights are the commands that a user of the library must be allowed: those that
// clients send, and those that the scripts call.
func leastRights(t *testing.T) []string {
	t.Helper()
	rights := []string{"+hello", "+ping", "+evalsha", "+eval", "+subscribe", "+publish", "+pexpire"}
	files, err := filepath.Glob("internal/redisserver/scripts/*.lua")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range calls.FindAllSubmatch(text, -1) {
			name := "+" + strings.ToLower(string(m[1]))
			if name == "+pubsub" {
				name = "+pubsub|numsub"
			}
			rights = append(rights, name)
		}
	}
	slices.Sort(rights)
	return slices.Compact(rights)
}

var calls = regexp.MustCompile(`call\('([A-Z]+)'`)

func TestTheDocumentedRightsAreThoseThatAreNeeded(t *testing.T) {
	_, section, _ := strings.Cut(readText(t, "docs/deployments.md"), "\n## Least rights\n")
	_, block, _ := strings.Cut(section, "```\n")
	block, _, _ = strings.Cut(block, "```")
	var got []string
	for _, word := range strings.Fields(block) {
		if strings.HasPrefix(word, "+") {
			got = append(got, word)
		}
	}
	slices.Sort(got)
	if want := leastRights(t); !slices.Equal(got, want) {
		t.Errorf("docs/deployments.md has\n%v, needed are\n%v", got, want)
	}
}

// What go-redis or Leased sends besides, each for one option.
func TestWhatOptionsNeedBesideTheLeastRights(t *testing.T) {
	primary := redistest.NewReplication(t, 1).Primary()
	admin := primary.Client()
	for option, c := range map[string]struct {
		change func(o *redis.Options)
		opts   []leased.Option
	}{
		"DB":           {change: func(o *redis.Options) { o.DB = 1 }},
		"ClientName":   {change: func(o *redis.Options) { o.ClientName = "orders" }},
		"WithReplicas": {opts: []leased.Option{leased.WithReplicas(1, time.Second)}},
	} {
		row := regexp.MustCompile("\n\\| `" + option + "`.*\\| `(\\+[^`]+)`").FindStringSubmatch(readText(t, "docs/deployments.md"))
		if row == nil {
			t.Errorf("docs/deployments.md does not say what %s needs", option)
			continue
		}
		for _, allowed := range []bool{false, true} {
			rights := []any{"ACL", "SETUSER", "app", "reset", "resetchannels", "on", ">secret", "~app:*", "&app:leased:inbox:*", "-@all"}
			for _, right := range leastRights(t) {
				rights = append(rights, right)
			}
			if allowed {
				rights = append(rights, strings.ReplaceAll(row[1], `\|`, "|"))
			}
			must(t, admin.Do(t.Context(), rights...).Err())
			rdb := primary.Client(func(o *redis.Options) {
				if o.Username, o.Password = "app", "secret"; c.change != nil {
					c.change(o)
				}
			})
			locks, err := leased.New(rdb, append(c.opts, leased.WithKeyPrefix("app:"), leased.WithLogger(slog.New(slog.DiscardHandler)))...)
			must(t, err)
			l, err := locks.Mutex(fmt.Sprint(option, allowed)).LockContext(t.Context())
			if allowed != (err == nil) || err != nil && !strings.Contains(err.Error(), "NOPERM") {
				t.Errorf("%s, with %s %v: %v", option, row[1], allowed, err)
			}
			if l != nil {
				must(t, l.Unlock())
			}
			_ = locks.Close()
		}
	}
}
