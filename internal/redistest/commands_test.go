package redistest

import (
	"maps"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestCallsAreThoseThatReachedTheServer(t *testing.T) {
	in := Server(t)
	rdb, ctx := in.Client(), t.Context()
	before, err := Calls(ctx, rdb)
	if err != nil {
		t.Fatal(err)
	}
	rdb.Set(ctx, "a", 1, 0)
	rdb.Get(ctx, "a")
	rdb.Get(ctx, "a")
	rdb.Eval(ctx, "return redis.call('GET', KEYS[1])", []string{"a"})
	after, err := Calls(ctx, rdb)
	if err != nil {
		t.Fatal(err)
	}
	got := after.Sub(before)
	if want := (Tally{"set": 1, "get": 3, "eval": 1}); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got.Total() != 5 {
		t.Errorf("total %d, want 5", got.Total())
	}
}

func TestCounterCountsWhatAClientSends(t *testing.T) {
	rdb, ctx := MiniClient(t, Mini(t)), t.Context()
	var c Counter
	rdb.AddHook(&c)
	rdb.Set(ctx, "a", 1, 0)
	_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.Get(ctx, "a")
		p.Get(ctx, "b")
		return nil
	})
	if err != nil && err != redis.Nil {
		t.Fatal(err)
	}
	if want := (Tally{"set": 1, "get": 2}); !maps.Equal(c.Commands(), want) {
		t.Errorf("commands %v", c.Commands())
	}
	// go-redis may dial once more than it needs.
	if c.Trips() != 2 || c.Pipelines() != 1 || c.Dials() < 1 {
		t.Errorf("trips %d, pipelines %d, dials %d", c.Trips(), c.Pipelines(), c.Dials())
	}
	c.Reset()
	if len(c.Commands()) != 0 || c.Trips() != 0 || c.Dials() != 0 {
		t.Error("Reset left something")
	}
}
