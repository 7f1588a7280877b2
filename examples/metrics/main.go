// Metrics shows what Prometheus gets to see of locks: it runs a few workers that compete
// for locks in an embedded Redis, and serves their metrics.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
	prometheusexporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/leasedmutex/leased"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, "127.0.0.1:2112"); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address string) error {
	server, err := miniredis.Run()
	if err != nil {
		return err
	}
	defer server.Close()
	provider, scrape, err := newProvider()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	web := &http.Server{Addr: address, Handler: scrape, ReadHeaderTimeout: time.Second}
	failed := make(chan error, 1)
	go func() { failed <- web.ListenAndServe() }() // ends with web.Close
	worked := make(chan error, 1)
	go func() { worked <- work(ctx, server.Addr(), provider) }() // ends with ctx; waited for below
	fmt.Printf("metrics at http://%s/metrics, until interrupted\n", address)
	select {
	case err = <-failed:
		cancel()
		err = errors.Join(err, <-worked)
	case err = <-worked:
	}
	return errors.Join(err, web.Close(), provider.Shutdown(context.Background()))
}

// newProvider returns an SDK whose metrics Prometheus reads from the handler.
func newProvider() (*metric.MeterProvider, http.Handler, error) {
	registry := prometheus.NewRegistry()
	reader, err := prometheusexporter.New(prometheusexporter.WithRegisterer(registry))
	if err != nil {
		return nil, nil, err
	}
	return metric.NewMeterProvider(metric.WithReader(reader)), promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}), nil
}

// newClient returns a client as a process would have one. In metrics, the locks order:1,
// order:2 and so on are all "order".
func newClient(address string, provider *metric.MeterProvider, opts ...leased.Option) (*leased.Client, *redis.Client, error) {
	rdb := redis.NewClient(&redis.Options{Addr: address, ContextTimeoutEnabled: true})
	client, err := leased.New(rdb, append([]leased.Option{
		leased.WithMeterProvider(provider),
		leased.WithLockLabelInMetrics(func(name string) string {
			label, _, _ := strings.Cut(name, ":")
			return label
		}),
	}, opts...)...)
	return client, rdb, err
}

// work has four processes compete for locks until ctx ends, or one of them fails.
func work(ctx context.Context, address string, provider *metric.MeterProvider) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error)
	const workers = 4
	for range workers {
		go func() { done <- worker(ctx, address, provider) }() // ends with ctx, and is waited for below
	}
	var errs []error
	for range workers {
		errs = append(errs, <-done)
		cancel() // one that ends before ctx has failed
	}
	return errors.Join(errs...)
}

func worker(ctx context.Context, address string, provider *metric.MeterProvider) (err error) {
	client, rdb, err := newClient(address, provider)
	if err != nil {
		return errors.Join(err, rdb.Close())
	}
	defer func() { err = errors.Join(err, client.Close(), rdb.Close()) }()
	for ctx.Err() == nil {
		name := fmt.Sprint("order:", rand.IntN(3))
		err := client.Mutex(name).Do(ctx, func(ctx context.Context) error {
			select {
			case <-time.After(time.Duration(rand.IntN(20)) * time.Millisecond): // the work
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		if err != nil && ctx.Err() == nil { // else it says that ctx has ended
			return err
		}
		if lease, err := client.Mutex("report").TryLockContext(ctx); err == nil {
			time.Sleep(time.Millisecond)
			if err := lease.Unlock(); err != nil {
				return err
			}
		}
	}
	return nil
}
