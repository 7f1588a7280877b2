// Command shutdown is an HTTP server that works under a lock, and shuts down as Kubernetes
// expects it to: on SIGTERM it takes no new requests, finishes those it has, and gives its locks back,
// so that the next process has them at once, and not when the TTL is over. deployment.yaml
// has the other half: it delays SIGTERM until new requests should have stopped.
//
//	go run ./shutdown -redis localhost:6379
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased"
)

// How long a request may take, the wait for the lock included.
const maxRequest = 15 * time.Second

// How long the program may take to end. deployment.yaml allows that, preStop, and 5 s to spare.
const (
	finishRequests = 20 * time.Second
	giveBackLocks  = 5 * time.Second
)

func main() {
	address := flag.String("redis", "localhost:6379", "`address` of Redis")
	listen := flag.String("listen", "localhost:8080", "`address` of the server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *address, *listen); err != nil {
		log.Fatal(err)
	}
}

// run serves until ctx ends, and then shuts down in this order: requests, locks, Redis.
func run(ctx context.Context, address, listen string) error {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	locks, err := leased.New(rdb, leased.WithTTL(10*time.Second)) // for a pod that dies without a word
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	if err != nil {
		return errors.Join(err, locks.Close(), rdb.Close())
	}
	fmt.Println("listening on", listener.Addr())
	fmt.Printf("try: curl -d for=10s http://%s/work, and end this program before it answers\n", listener.Addr())
	server := &http.Server{Handler: routes(locks), ReadHeaderTimeout: 5 * time.Second}
	failed := make(chan error, 1)
	// Owned by run, ended by server.Shutdown or a failure, waited for through failed.
	go func() { failed <- server.Serve(listener) }()

	select {
	case err = <-failed:
	case <-ctx.Done():
		err = finish(server)
		if ended := <-failed; !errors.Is(ended, http.ErrServerClosed) {
			err = errors.Join(err, ended)
		}
	}
	return errors.Join(err, giveBack(locks), rdb.Close())
}

// finish takes no new requests, and waits for those that are under way.
func finish(server *http.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), finishRequests)
	defer cancel()
	return server.Shutdown(ctx)
}

// giveBack ends what still waits or works under a lock: its contexts end with
// leased.ErrClosed. The error names the locks that were not unlocked in time; those are
// left to their TTL, for somebody may still be working under them.
func giveBack(locks *leased.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), giveBackLocks)
	defer cancel()
	return locks.Shutdown(ctx)
}

// routes has one route, which works for as long as it is told to, under the lock.
func routes(locks *leased.Client) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /work", func(w http.ResponseWriter, r *http.Request) {
		lasts, err := time.ParseDuration(r.FormValue("for"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		bounded, cancel := context.WithTimeout(r.Context(), maxRequest)
		defer cancel()
		err = locks.Mutex("work").Do(bounded, func(ctx context.Context) error {
			fmt.Println("working")
			select {
			case <-time.After(lasts):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		if err != nil {
			log.Print(err)
			http.Error(w, "try again later", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "done")
	})
	return mux
}
