package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	prometheusexporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
)

const (
	serviceName = "orders"
	// A trace should be in Jaeger soon after the order was served. A service with
	// traffic keeps the SDK's default, 5 s.
	batchFor = 200 * time.Millisecond
	sendFor  = 2 * time.Second
)

// telemetry is the OpenTelemetry SDK of one process: traces go to a collector by
// OTLP over HTTP, metrics are read by Prometheus.
type telemetry struct {
	traces  *trace.TracerProvider
	metrics *metric.MeterProvider
	scrape  http.Handler
}

func newTelemetry(ctx context.Context, instance, collector string) (*telemetry, error) {
	exporter, err := otlptracehttp.New(ctx,
		otlptracehttp.WithEndpoint(collector),
		otlptracehttp.WithInsecure(),
		otlptracehttp.WithTimeout(sendFor))
	if err != nil {
		return nil, fmt.Errorf("cannot export traces to %s: %w", collector, err)
	}
	who := resource.NewSchemaless(
		attribute.String("service.name", serviceName),
		attribute.String("service.instance.id", instance))
	registry := prometheus.NewRegistry()
	reader, err := prometheusexporter.New(prometheusexporter.WithRegisterer(registry))
	if err != nil {
		return nil, err
	}
	return &telemetry{
		traces:  trace.NewTracerProvider(trace.WithResource(who), trace.WithBatcher(exporter, trace.WithBatchTimeout(batchFor))),
		metrics: metric.NewMeterProvider(metric.WithResource(who), metric.WithReader(reader)),
		scrape:  promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}), // with exemplars
	}, nil
}

// stop sends what is left. It waits sendFor at most: a collector that is gone must
// not keep a service from ending.
func (t *telemetry) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), sendFor)
	defer cancel()
	return errors.Join(t.traces.Shutdown(ctx), t.metrics.Shutdown(ctx))
}
