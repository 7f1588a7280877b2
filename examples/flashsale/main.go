// Command flashsale sells a stock of 100 by three HTTP servers. Their lock is in Redis;
// the stock is in PostgreSQL, which compares the lock's fencing tokens.
//
//	go run . -redis redis://localhost:6379 -database postgres://localhost/test -recipe first-access
//
// Read store.go first: it has the right recipes beside the wrong ones. Its test starts a
// Redis and a PostgreSQL, and breaks them and the servers during the sale.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// options are the command line.
type options struct {
	serve    bool
	redis    string
	database string
	recipe   string
	stock    int
	ttl      time.Duration
	think    time.Duration
	pause    string
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("flashsale", flag.ContinueOnError)
	f.StringVar(&o.redis, "redis", "redis://localhost:6379", "`URL` of the Redis that keeps the lock")
	f.StringVar(&o.database, "database", "postgres://localhost/test", "`URL` of the PostgreSQL that keeps the stock; the tables item and sale are dropped")
	f.StringVar(&o.recipe, "recipe", "first-access", "what is done with the token: "+strings.Join(slices.Sorted(maps.Keys(recipes)), ", "))
	f.IntVar(&o.stock, "stock", 100, "`pieces` in stock")
	f.DurationVar(&o.ttl, "ttl", 5*time.Second, "the lock's TTL")
	f.DurationVar(&o.think, "think", 5*time.Millisecond, "`time` between reading and writing")
	f.BoolVar(&o.serve, "serve", false, "be one of the servers, and print its address; ends with its standard input")
	f.StringVar(&o.pause, "pause", "", "`URL` that a server asks between reading and writing, for tests")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if _, ok := recipes[o.recipe]; !ok {
		return o, fmt.Errorf("there is no recipe %q", o.recipe)
	}
	return o, nil
}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	switch {
	case err != nil:
	case o.serve:
		err = serve(ctx, o)
	default:
		err = demo(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "flashsale:", err)
		return 1
	}
	return 0
}

// demo holds one sale and prints how it ended.
func demo(ctx context.Context, o options) error {
	db, err := sql.Open("pgx", o.database)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := (store{db}).recreate(ctx, item, o.stock); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	s := &sale{program: program, options: o}
	defer s.end()
	for range 3 {
		if err := s.add(); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := s.buyAll(ctx, 2*o.stock); err != nil {
		return err
	}
	left, sold, err := store{db}.count(ctx, item)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %d of %d sold in %v, %d left, by 3 servers\n", o.recipe, sold, o.stock, time.Since(began).Round(time.Millisecond), left)
	return nil
}

// serve is one of the servers, until its standard input ends.
func serve(ctx context.Context, o options) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Owned by the process, whose last act is to be ended by it.
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		cancel()
	}()
	options, err := redis.ParseURL(o.redis)
	if err != nil {
		return errors.New("-redis is not a URL such as redis://localhost:6379/0") // err quotes parts of it, perhaps a password
	}
	options.ContextTimeoutEnabled = true // the locks bound every command by its context
	rdb := redis.NewClient(options)
	defer rdb.Close()
	locks, err := leased.New(rdb, leased.WithTTL(o.ttl), leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, locks.Close()) }()
	db, err := sql.Open("pgx", o.database)
	if err != nil {
		return err
	}
	defer db.Close()

	s := &shop{locks: locks, stock: store{db}, how: o.recipe, think: o.think, pause: o.pause, answer: 1500 * time.Millisecond}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println("http://" + listener.Addr().String())
	server := &http.Server{Handler: s.routes(), ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // Serve tells
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
