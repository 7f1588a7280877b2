package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/spf13/cobra"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// quietRedis keeps go-redis from writing its own log lines between ours. Everything that matters is
// returned as an error.
func quietRedis() { logging.Disable() }

const (
	connectTime    = 5 * time.Second // for the first answer from a server
	completionTime = time.Second     // for looking up the names that a shell completes
)

// address says where Redis is, as given by the command line and the environment. Its exported
// fields are passed to the processes of the demo.
type address struct {
	Redis    string // a URL, or HOST:PORT, or several, separated by commas
	Quorum   bool   // the servers are independent of each other
	Cluster  bool
	Sentinel string // the name of the primary; the addresses in Redis are then those of sentinels
	TLS      bool
	CACert   string
	Cert     string
	Key      string

	prefix     string        // of keys; the application's
	quarantine time.Duration // of a quorum's servers; the application's; 0 for the default
	said       []string      // each --redis that was given
	place      string        // what connect has reached, for errors
}

// bind adds the flags of an address to a command.
func (a *address) bind(c *cobra.Command) {
	a.bindServer(c, "`ADDRESS` of Redis: a URL such as rediss://user@host:6379/0, or HOST:PORT, or several with "+
		"commas between them; default: $LEASED_REDIS, then $REDIS_URL, then localhost:6379")
	c.Flags().BoolVar(&a.Quorum, "quorum", false, "the addresses are of independent servers, as for leased.NewQuorum: 3, 5 or 7; for run, inspect and unlock")
	c.Flags().DurationVar(&a.quarantine, "quarantine", 0, "the `DURATION` that the application gives to leased.WithQuarantine, with --quorum; at least the longest TTL "+
		"of any lock of any process (default 1m)")
	c.Flags().StringVar(&a.prefix, "prefix", "", "key `PREFIX` that the application gives to leased.WithKeyPrefix")
}

// bindOne is bind for commands that look at one server. Given --quorum, they say so.
func (a *address) bindOne(c *cobra.Command) {
	a.bind(c)
	for _, name := range []string{"quorum", "quarantine"} {
		_ = c.Flags().MarkHidden(name) // it is there
	}
}

func (a *address) bindServer(c *cobra.Command, usage string) {
	f := c.Flags()
	f.Var((*addressFlag)(a), "redis", usage)
	f.BoolVar(&a.Cluster, "cluster", false, "the addresses are of Cluster nodes")
	f.StringVar(&a.Sentinel, "sentinel", "", "the addresses are of Sentinels that watch the primary called `NAME`")
	f.BoolVar(&a.TLS, "tls", false, "use TLS, as a URL that begins with rediss:// does")
	f.StringVar(&a.CACert, "cacert", "", "`FILE` with the certificates to trust, instead of the system's")
	f.StringVar(&a.Cert, "cert", "", "`FILE` with the certificate to present; needs --key")
	f.StringVar(&a.Key, "key", "", "`FILE` with the key of --cert")
	// This could be left to cobra, whose error would not be one of usage.
	c.PreRunE = func(*cobra.Command, []string) error {
		if (a.Cert == "") != (a.Key == "") {
			return usagef("--cert needs --key, and --key needs --cert")
		}
		if a.quarantine != 0 && !a.Quorum {
			return usagef("--quarantine is for the servers of a quorum, so it needs --quorum")
		}
		return nil
	}
}

// addressFlag is --redis. To give it several times is to give all of its values with commas between
// them, each once.
type addressFlag address

func (f *addressFlag) String() string { return "" }
func (f *addressFlag) Type() string   { return "string" }

func (f *addressFlag) Set(s string) error {
	if s != "" && !slices.Contains(f.said, s) { // completion has every flag parsed twice
		f.said = append(f.said, s)
	}
	f.Redis = strings.Join(f.said, ",")
	return nil
}

// fill takes from the environment what the command line did not say.
func (a *address) fill() {
	for _, name := range []string{"LEASED_REDIS", "REDIS_URL"} {
		if a.Redis == "" {
			a.Redis = os.Getenv(name)
		}
	}
	if a.Redis == "" {
		a.Redis = "localhost:6379"
	}
}

const severalServers = "--redis names several servers: add --cluster, --sentinel NAME or --quorum"

// options returns the options for a go-redis client.
func (a *address) options() (*redis.UniversalOptions, error) {
	if a.Cluster && a.Sentinel != "" {
		return nil, usagef("--cluster and --sentinel exclude each other")
	}
	o := &redis.UniversalOptions{
		MasterName:    a.Sentinel,
		IsClusterMode: a.Cluster,
		// Commands end with their context, and a missing server is reported quickly.
		ContextTimeoutEnabled:    true,
		DialerRetries:            1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if strings.Contains(a.Redis, "://") {
		// A comma in a URL may be that of a password, so only how often the flag was given tells.
		switch {
		case len(a.said) > 1 && (a.Cluster || a.Sentinel != ""):
			return nil, usagef("--redis takes one URL: name the other nodes or sentinels in it by addr=HOST:PORT, or give HOST:PORT for all")
		case len(a.said) > 1:
			return nil, usagef(severalServers)
		}
		if err := a.fromURL(o); err != nil {
			return nil, err
		}
	} else {
		for host := range strings.SplitSeq(a.Redis, ",") {
			host, err := a.withPort(host)
			if err != nil {
				return nil, err
			}
			o.Addrs = append(o.Addrs, host)
		}
	}
	if len(o.Addrs) > 1 && !a.Cluster && o.MasterName == "" {
		return nil, usagef(severalServers)
	}
	if a.TLS || a.CACert != "" || a.Cert != "" {
		if o.TLSConfig == nil {
			o.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
			if len(o.Addrs) == 1 && o.MasterName == "" { // Sentinels name the primary, which has a certificate of its own
				o.TLSConfig.ServerName, _, _ = net.SplitHostPort(o.Addrs[0])
			}
		}
		if err := a.certificates(o.TLSConfig); err != nil {
			return nil, err
		}
	}
	if o.MasterName != "" && o.ReadTimeout == 0 {
		o.ReadTimeout, o.MaxRetries = 2*time.Second, -1 // so that a Sentinel that hangs is left for another one
	}
	return o, nil
}

// fromURL sets the options that go-redis reads from a URL. The URL may also name sentinels:
// ?master_name=main&addr=host:26379.
func (a *address) fromURL(o *redis.UniversalOptions) error {
	fail := func(err error) error {
		// The error of net/url repeats the URL, or what it took for its port, which may be a password.
		if err == nil || errors.As(err, new(*url.Error)) {
			return usagef("--redis is not a URL such as redis://localhost:6379/0; a password in it must be percent-encoded: write / as %%2F, ? as %%3F, # as %%23, @ as %%40, : as %%3A, %% as %%25 and a comma as %%2C")
		}
		return usagef("--redis is not a Redis URL such as redis://localhost:6379/0: %s", strings.TrimPrefix(err.Error(), "redis: "))
	}
	u, err := url.Parse(a.Redis)
	if err != nil || u.Scheme != "unix" && passesForMore(u) {
		return fail(err)
	}
	query := u.Query()
	switch {
	case a.Cluster:
		from, err := redis.ParseClusterURL(a.Redis)
		if err != nil {
			return fail(err)
		}
		o.Addrs, o.Username, o.Password, o.TLSConfig = from.Addrs, from.Username, from.Password, from.TLSConfig
	case a.Sentinel != "" || query.Has("master_name"):
		if a.Sentinel != "" {
			query.Set("master_name", a.Sentinel)
			u.RawQuery = query.Encode()
		}
		from, err := redis.ParseFailoverURL(u.String())
		if err != nil {
			return fail(err)
		}
		o.MasterName, o.Addrs, o.DB, o.TLSConfig = from.MasterName, from.SentinelAddrs, from.DB, from.TLSConfig
		o.Username, o.Password = from.Username, from.Password
		if o.TLSConfig != nil {
			o.TLSConfig.ServerName = "" // go-redis takes that of the first sentinel, also for the primary
		}
		o.SentinelUsername, o.SentinelPassword = from.SentinelUsername, from.SentinelPassword
		o.ReadTimeout, o.MaxRetries = from.ReadTimeout, from.MaxRetries
	default:
		from, err := redis.ParseURL(a.Redis)
		if err != nil {
			return fail(err)
		}
		o.Addrs, o.DB, o.Username, o.Password, o.TLSConfig = []string{from.Addr}, from.DB, from.Username, from.Password, from.TLSConfig
		if from.Network == "unix" {
			o.Dialer = func(ctx context.Context, _, addr string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", addr)
			}
		}
	}
	return nil
}

// passesForMore reports whether a part of a password may pass for the path, the query or the fragment of a
// URL: the rest of the password then follows there, with the @ that ends it. The value of a parameter may
// have an @.
func passesForMore(u *url.URL) bool {
	name, _, _ := strings.Cut(u.RawQuery, "=")
	return strings.Contains(u.Path+name+u.Fragment, "@")
}

// withPort completes HOST to HOST:PORT.
func (a *address) withPort(host string) (string, error) {
	host = strings.TrimSpace(host)
	port := "6379"
	if a.Sentinel != "" {
		port = "26379"
	}
	if host == "" || strings.ContainsAny(host, "/@ ") {
		return "", usagef("--redis is neither a Redis URL such as redis://localhost:6379/0 nor HOST:PORT")
	}
	if !strings.Contains(host, ":") || strings.HasSuffix(host, "]") {
		return net.JoinHostPort(strings.Trim(host, "[]"), port), nil
	}
	if _, _, err := net.SplitHostPort(host); err != nil {
		return "", usagef("--redis is neither a Redis URL such as redis://localhost:6379/0 nor HOST:PORT: %v", err)
	}
	return host, nil
}

func (a *address) certificates(c *tls.Config) error {
	if a.CACert != "" {
		text, err := os.ReadFile(a.CACert)
		if err != nil {
			return usagef("--cacert: %v", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return usagef("--cacert: there is no certificate in %s", a.CACert)
		}
	}
	if a.Cert != "" {
		pair, err := tls.LoadX509KeyPair(a.Cert, a.Key)
		if err != nil {
			return usagef("--cert: %v", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return nil
}

// connect returns a client once the server has answered. If change is given, it alters the client's
// options first.
func (a *address) connect(ctx context.Context, change ...func(*redis.UniversalOptions)) (redis.UniversalClient, error) {
	a.fill()
	if a.Quorum {
		return nil, usagef("this command looks at one server: name one of the quorum's, without --quorum")
	}
	o, err := a.options()
	if err != nil {
		return nil, err
	}
	for _, f := range change {
		f(o)
	}
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	connect := connectServer
	if a.Cluster {
		connect = connectCluster
	}
	rdb, err := connect(ctx, o)
	if err != nil {
		if errors.As(err, new(redis.Error)) { // it has answered
			return nil, fmt.Errorf("cannot use Redis at %s: %w", where(o), inPlainWords(err))
		}
		return nil, fmt.Errorf("no Redis at %s: %w", where(o), unconnected(o, err))
	}
	a.place = where(o)
	return rdb, nil
}

// connectServer returns a client of a server that answers. One that runs a long script or loads its data is
// waited for until ctx ends. One that cannot save its data refuses PING, but shows the locks that there are.
func connectServer(ctx context.Context, o *redis.UniversalOptions) (redis.UniversalClient, error) {
	rdb := redis.NewUniversalClient(o)
	var busy error // the last answer, if that was none for good
	for {
		err := rdb.Ping(ctx).Err()
		switch {
		case err == nil, redis.HasErrorPrefix(err, "MISCONF"):
			return rdb, nil
		case redis.HasErrorPrefix(err, "BUSY"), redis.HasErrorPrefix(err, "LOADING"):
			busy = err
		case busy == nil || ctx.Err() == nil:
			rdb.Close()
			return nil, err
		}
		if pause(ctx, 100*time.Millisecond); ctx.Err() != nil {
			rdb.Close()
			return nil, busy
		}
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// connectWhole is connect for commands that look at all keys, or use keys of any slot. A node of a
// Cluster that is asked as if it were a server of its own knows only the locks of its slots, and does
// not say so.
func (a *address) connectWhole(ctx context.Context) (redis.UniversalClient, error) {
	rdb, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	if node, ok := rdb.(*redis.Client); ok && isPart(ctx, node) {
		rdb.Close()
		return nil, fmt.Errorf("cannot use Redis at %s: it is a node of a Cluster, and knows only a part of the locks: add --cluster", node.Options().Addr)
	}
	return rdb, nil
}

// connection is a client of the library, which holds nothing by itself, and the servers that it uses.
type connection struct {
	client  *leased.Client
	servers []redis.UniversalClient // several if they are a quorum
	prefix  string
	replica bool // run began at a replica, see onReplica

	quorum     bool // the servers are one
	quarantine time.Duration
}

func (c *connection) close() {
	c.client.Close() // it holds nothing, so there is no error to report
	for _, rdb := range c.servers {
		rdb.Close()
	}
}

// again returns a connection that only asks, for when c.client is closed. Its client is that of one server: those of
// a quorum are asked one by one.
func (c *connection) again() (*connection, error) {
	again := *c
	var err error
	again.client, err = newClient(c.servers[0], c.prefix)
	return &again, err
}

// open returns a connection for work on one lock. Whoever has the lock has answered.
func (a *address) open(ctx context.Context, name string, opts ...leased.Option) (*connection, error) {
	if a.Quorum {
		return a.openQuorum(ctx, opts...)
	}
	rdb, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	if err := reach(ctx, rdb, a.prefix, name); err != nil {
		rdb.Close()
		return nil, err
	}
	client, err := newClient(rdb, a.prefix, opts...)
	if err != nil {
		rdb.Close()
		return nil, err
	}
	return &connection{client: client, servers: []redis.UniversalClient{rdb}, prefix: a.prefix}, nil
}

// onReplica reports whether the connection is to a replica. Where Sentinels or a Cluster tell which server
// is the primary, a replica is soon left, so it does not count; nor does one of a quorum's servers.
func (c *connection) onReplica(ctx context.Context) bool {
	node, ok := c.servers[0].(*redis.Client)
	if !ok || len(c.servers) > 1 || redisserver.DeploymentOf(node).FollowsSentinel() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second) // as in alias: if it does not answer, waiting shows
	defer cancel()
	return hello(ctx, node)["role"] == "replica"
}

// clientOptions returns opts and those of every client, which logs nothing unless opts have a
// logger: here, everything that matters is an error.
func clientOptions(prefix string, opts []leased.Option) []leased.Option {
	return append([]leased.Option{leased.WithKeyPrefix(prefix), leased.WithLogger(slog.New(slog.DiscardHandler))}, opts...)
}

func newClient(rdb redis.UniversalClient, prefix string, opts ...leased.Option) (*leased.Client, error) {
	client, err := leased.New(rdb, clientOptions(prefix, opts)...)
	if err != nil {
		return nil, usagef("--prefix: %s", bare(err))
	}
	return client, nil
}

// where names the servers, without a password.
func where(o *redis.UniversalOptions) string {
	text := strings.Join(o.Addrs, ",")
	if o.MasterName != "" {
		text = fmt.Sprintf("%q of the sentinels %s", o.MasterName, text)
	}
	return text
}
