package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"testing"

	"github.com/alicebob/miniredis/v2"

	"github.com/leasedmutex/leased"
)

// From a slow bucket to a trace that was slow.
func TestTheWaitHistogramHasExemplarsThatNameATrace(t *testing.T) {
	exported := scrape(t, "application/openmetrics-text; version=1.0.0")
	if !regexp.MustCompile(`(?m)^leased_wait_duration_seconds_bucket.*# \{.*trace_id="[0-9a-f]{32}"`).MatchString(exported) {
		t.Errorf("no bucket has an exemplar:\n%s", exported)
	}
}

// scrape returns what Prometheus would get from a process in which a lock was used.
func scrape(t *testing.T, format string) string {
	address, _ := collector(t)
	otel, err := newTelemetry(t.Context(), "test", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := otel.stop(); err != nil {
			t.Error(err)
		}
	}()
	m := miniredis.RunT(t)
	rdb, err := connect(t.Context(), "redis://"+m.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithTracerProvider(otel.traces), leased.WithMeterProvider(otel.metrics))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, span := otel.traces.Tracer("test").Start(t.Context(), "test")
	defer span.End()
	lease, err := client.Mutex("m").LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Unlock(); err != nil {
		t.Fatal(err)
	}
	request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	request.Header.Set("Accept", format)
	answer := httptest.NewRecorder()
	otel.scrape.ServeHTTP(answer, request)
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.Code != 200 {
		t.Fatalf("status %d, %v: %s", answer.Code, err, text)
	}
	return string(text)
}
