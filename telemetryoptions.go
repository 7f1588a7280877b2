package leased

import (
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// WithTracerProvider sets who makes the spans of waits and holds. The default is
// the global provider, also one that is set after New. Close the client before
// the provider is shut down: spans are ended a moment after their locks.
func WithTracerProvider(p trace.TracerProvider) Option {
	return clientOption(func(o *clientOptions) error {
		if isNil(p) {
			return invalid("tracer provider is nil; leave the option out for the global one")
		}
		o.tracers = p
		return nil
	})
}

// WithMeterProvider sets who makes the instruments of the metrics. The default is
// the global provider, also one that is set after New.
func WithMeterProvider(p metric.MeterProvider) Option {
	return clientOption(func(o *clientOptions) error {
		if isNil(p) {
			return invalid("meter provider is nil; leave the option out for the global one")
		}
		o.meters = p
		return nil
	})
}

// WithUncontendedSpans makes spans for every call of Lock, RLock and their Try
// forms. They have no parent, so by default they have spans only if they waited
// for another or another for them, or their lease did not end well.
func WithUncontendedSpans() Option {
	return clientOption(func(o *clientOptions) error {
		o.everySpan = true
		return nil
	})
}

// WithLockNameInMetrics adds the lock's name to the metrics, as the attribute
// leased.lock. Each name costs the backend series of its own: use it where names
// are few. Spans always have it.
func WithLockNameInMetrics() Option {
	return clientOption(func(o *clientOptions) error {
		o.nameInMetrics = true
		return nil
	})
}
