package main

import (
	"errors"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"go.opentelemetry.io/otel/trace/noop"
)

func TestTwoOwnersThatHaveReadTheStockDoNotBothWriteIt(t *testing.T) {
	rdb, err := connect(t.Context(), "redis://"+miniredis.RunT(t).Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer rdb.Close()
	s := &stock{rdb: rdb, tracer: noop.NewTracerProvider().Tracer("")}
	if err := fill(t.Context(), rdb, "", "pear", 50); err != nil {
		t.Fatal(err)
	}
	for _, token := range []uint64{7, 8} {
		if left, err := s.read(t.Context(), "pear", token); left != 50 || err != nil {
			t.Fatalf("read %d with token %d: %v", left, token, err)
		}
	}
	if err := s.write(t.Context(), "pear", 49, 7); !errors.Is(err, errOvertook) {
		t.Errorf("the first owner's write: %v", err)
	}
	if err := s.write(t.Context(), "pear", 49, 8); err != nil {
		t.Errorf("the second owner's write: %v", err)
	}
	if _, err := s.read(t.Context(), "pear", 7); !errors.Is(err, errOvertook) {
		t.Errorf("the first owner reads again: %v", err)
	}
}
