package main

import (
	"bytes"
	"context"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/leasedmutex/leased"
)

func TestACustomerIsNotToldWhatFailed(t *testing.T) {
	var logged bytes.Buffer
	log.SetOutput(&logged)
	defer log.SetOutput(os.Stderr)
	m := miniredis.RunT(t)
	rdb, err := connect(t.Context(), "redis://"+m.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer rdb.Close()
	locks, err := leased.New(rdb)
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close()
	s := &shop{"orders-1", &stock{rdb: rdb, locks: locks, tracer: noop.NewTracerProvider().Tracer(""), prefix: "shop:"}}
	if err := m.Set(stockKey("shop:", "pear"), "not a hash"); err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for _, c := range []struct {
		ctx    context.Context
		status int
		body   string
		logged string
	}{
		{t.Context(), http.StatusInternalServerError, "Internal Server Error\n", "WRONGTYPE"},
		{ended, http.StatusServiceUnavailable, "try again later\n", "not acquired"},
	} {
		logged.Reset()
		answer := httptest.NewRecorder()
		s.order(answer, httptest.NewRequestWithContext(c.ctx, http.MethodPost, orderPath, strings.NewReader(`{"item": "pear", "pieces": 1}`)))
		if body := answer.Body.String(); answer.Code != c.status || body != c.body {
			t.Errorf("the customer is answered %d %q, want %d %q", answer.Code, body, c.status, c.body)
		}
		if text := logged.String(); !strings.Contains(text, "orders-1: ") || !strings.Contains(text, c.logged) {
			t.Errorf("the log says %q, want %q in it", text, c.logged)
		}
	}
}
