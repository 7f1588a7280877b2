package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	prometheusexporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/leasedmutex/leased"
)

// setUp is what docs/telemetry.md shows, around the rest of a program.
func setUp(ctx context.Context, program func() error) (err error) {
	exporter, err := otlptracehttp.New(ctx) // OTEL_EXPORTER_OTLP_ENDPOINT says where to
	if err != nil {
		return err
	}
	reader, err := prometheusexporter.New() // serve promhttp.Handler() under /metrics
	if err != nil {
		return err
	}
	traces := trace.NewTracerProvider(trace.WithBatcher(exporter))
	metrics := metric.NewMeterProvider(metric.WithReader(reader))
	otel.SetTracerProvider(traces)
	otel.SetMeterProvider(metrics)
	defer func() { err = errors.Join(err, traces.Shutdown(ctx), metrics.Shutdown(ctx)) }() // after the leased.Client
	return program()
}

func TestTheSetUpOfTheTelemetryPageExportsSpansAndMetrics(t *testing.T) {
	address, sent := collector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+address)
	m := miniredis.RunT(t)
	err := setUp(t.Context(), func() error {
		rdb, err := connect(t.Context(), "redis://"+m.Addr())
		if err != nil {
			return err
		}
		defer rdb.Close()
		locks, err := leased.New(rdb)
		if err != nil {
			return err
		}
		err = locks.Mutex("m").Do(t.Context(), func(context.Context) error { return nil })
		answer := httptest.NewRecorder()
		promhttp.Handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		if !strings.Contains(answer.Body.String(), "leased_leases_total") {
			t.Errorf("there are no metrics of locks:\n%s", answer.Body)
		}
		return errors.Join(err, locks.Close())
	})
	if err != nil {
		t.Fatal(err)
	}
	if sent.Load() == 0 {
		t.Error("no spans were sent")
	}
}
