package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"

	"github.com/leasedmutex/leased"
)

// serveCommand makes this program one process of the order service.
const serveCommand = "serve-orders"

// setup is what a process is told, as one line of JSON on its standard input.
// It serves until that input ends.
type setup struct {
	Instance string
	Redis    string // URL
	OTLP     string // host:port of the collector
	Prefix   string // of all keys
	Think    time.Duration
}

// greeting is what it says when it serves, as one line on its standard output.
type greeting struct{ Address string }

const (
	orderPath  = "/orders"
	orderSpan  = "POST " + orderPath
	orderFor   = 20 * time.Second // the longest that an order may take
	serviceTTL = 10 * time.Second // of leases: how long the others wait if a process dies
)

// order is the body of POST /orders.
type order struct {
	Item   string `json:"item"`
	Pieces int    `json:"pieces"`
}

// receipt is the answer to an order that was accepted.
type receipt struct {
	Process string `json:"process"`
	Left    int    `json:"left"`
	Token   uint64 `json:"token"`
}

// serve is the whole life of a process of the service.
func serve(ctx context.Context, std streams) (err error) {
	// Ctrl-C in a terminal reaches every process. Only the parent acts on it, by
	// closing our standard input. Swallowed, not ignored: Windows would end us.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt)

	in := json.NewDecoder(std.in)
	var s setup
	if err := in.Decode(&s); err != nil {
		return fmt.Errorf("%s is started by this program itself, see --help: %w", serveCommand, err)
	}
	otel, err := newTelemetry(ctx, s.Instance, s.OTLP)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, otel.stop()) }()
	rdb, err := connect(ctx, s.Redis)
	if err != nil {
		return err
	}
	defer rdb.Close()
	// The two providers are all that the library needs for spans and metrics. Without
	// these options it would use the global ones.
	locks, err := leased.New(rdb,
		leased.WithTracerProvider(otel.traces),
		leased.WithMeterProvider(otel.metrics),
		leased.WithKeyPrefix(lockPrefix(s.Prefix)),
		leased.WithOwner(s.Instance),
		leased.WithTTL(serviceTTL))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, locks.Close()) }()

	shop := &shop{s.Instance, &stock{rdb, locks, otel.traces.Tracer(serviceName), s.Prefix, s.Think}}
	mux := http.NewServeMux()
	mux.Handle(orderSpan, otelhttp.NewHandler(http.HandlerFunc(shop.order), orderSpan,
		otelhttp.WithTracerProvider(otel.traces), otelhttp.WithMeterProvider(otel.metrics)))
	mux.Handle("GET /metrics", otel.scrape)

	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	ended := make(chan struct{})
	// Owned by serve, ended by the end of the input, and not waited for: if the server
	// fails first, nothing can interrupt the reading, and the process ends anyway.
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, std.in)
		ctx, cancel := context.WithTimeout(context.Background(), childEndsIn/2)
		defer cancel()
		_ = server.Shutdown(ctx) // orders that take longer are cut off
	}()
	if err := json.NewEncoder(std.out).Encode(greeting{listener.Addr().String()}); err != nil {
		return err
	}
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-ended
	return nil
}

// shop answers orders over HTTP.
type shop struct {
	instance string
	stock    *stock
}

func (s *shop) order(w http.ResponseWriter, r *http.Request) {
	var o order
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&o); err != nil || o.Item == "" || o.Pieces < 1 {
		http.Error(w, `want {"item": "mug", "pieces": 1}`, http.StatusBadRequest)
		return
	}
	// r's context ends with the client's connection and carries the handler's span.
	ctx, cancel := context.WithTimeout(r.Context(), orderFor)
	defer cancel()
	left, token, err := s.stock.reserve(ctx, o.Item, o.Pieces)
	switch {
	case err == nil:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(receipt{s.instance, left, token}) // a client that is gone does not matter
	case errors.Is(err, errSoldOut):
		http.Error(w, "sold out", http.StatusConflict)
	case errors.Is(err, leased.ErrNotAcquired):
		log.Printf("%s: %v", s.instance, err) // not for the customer: it may name servers
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	default:
		log.Printf("%s: %v", s.instance, err)
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
	}
}
