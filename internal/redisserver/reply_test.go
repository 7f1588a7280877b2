package redisserver

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// A proxy, a mock or another server may return anything. What no script returns must be an error: neither a
// panic nor an answer.
func TestAReplyThatNoScriptReturnsIsAnError(t *testing.T) {
	var (
		anything = []any{nil, "", int64(1), "text", []any{}, []any{nil}, []any{int64(1)}, []any{"1", "2"}}
		short    = []any{"7", "9", int64(0), int64(500), "owner", int64(1)}
		snapshot = []any{"", int64(noKey), int64(9), "", []any{}, []any{}, int64(0)}
		eviction = []any{int64(7), int64(1), int64(0), []any{"owner"}}
	)
	fails := func(what string, reply any, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: %v is accepted", what, reply)
		}
	}
	with := func(good []any, i int, v any) []any {
		bad := slices.Clone(good)
		bad[i] = v
		return bad
	}
	if a, err := parseAnswer(short); err != nil || a.Token != 7 || a.Clock != 9 || a.Left != 500*time.Millisecond || a.Blocker != "owner" || a.Echo != 1 {
		t.Errorf("%v: %+v, %v", short, a, err)
	}
	for i, bad := range []any{"x", "-1", "one", "500", int64(1), "1"} {
		reply := with(short, i, bad)
		_, err := parseAnswer(reply)
		fails("a waiting request", reply, err)
	}
	for n := range len(short) - 1 {
		_, err := parseAnswer(short[:n])
		fails("a waiting request", short[:n], err)
	}
	_, err := parseAnswer(append(slices.Clone(short), int64(0)))
	fails("a waiting request", "one more", err)

	for _, reply := range anything {
		if n, ok := reply.(int64); !ok || n != 1 {
			if c := parseCanceled(reply, nil); c.Fail == nil || c.Owned {
				t.Errorf("a cancel: %v is read as %+v", reply, c)
			}
		}
		_, err := parseEviction(reply)
		fails("an eviction", reply, err)
		all, _ := reply.([]any)
		_, err = parseSnapshot(all)
		fails("a snapshot", reply, err)
	}
	for i, bad := range map[int][]any{1: {int64(-1), int64(2)}, 3: {nil, []any{}}} { // it cannot have notified so many
		for _, v := range bad {
			_, err := parseEviction(with(eviction, i, v))
			fails("an eviction", with(eviction, i, v), err)
		}
	}
	_, err = parseSnapshot(append(slices.Clone(snapshot), int64(0)))
	fails("a snapshot", "one more", err)
	for _, reply := range append(slices.Clone(anything[:7]), []any{"x", int64(1)}, []any{"-1", int64(1)}, []any{int64(7), int64(1)}) {
		_, _, err := marked(reply)
		fails("a vote", reply, err)
	}
}

// A cancel that was carried out has been carried out, whatever else its answer says.
func TestATokenOfACancelThatCannotBeOneIsNone(t *testing.T) {
	for _, bad := range []any{int64(-1), int64(1 << 53), "7", nil} {
		reply := []any{int64(codeGranted), int64(0), int64(1), bad, bad, bad, int64(0)}
		if c := parseCanceled(reply, nil); c.Fail != nil || !c.Owned || c.Token != 0 || c.Clock != 0 || c.Mark != 0 {
			t.Errorf("%v: %+v", bad, c)
		}
		if mixed := parseCanceled([]any{int64(codeGranted), int64(0), int64(1), int64(7), int64(9), bad, int64(0)}, nil); mixed.Token != 7 || mixed.Mark != 0 {
			t.Errorf("%v: %+v", bad, mixed)
		}
	}
}

// A server that is compatible may return scores in the ways of RESP3.
func TestAListInASnapshotMayHaveItsNumbersInAnyForm(t *testing.T) {
	for _, readers := range [][]any{
		{"id", "1700000000000", "other", "1700000000001"},
		{"id", int64(1700000000000), "other", int64(1700000000001)},
		{"id", 1700000000000.0, "other", 1700000000001.0},
		{[]any{"id", "1700000000000"}, []any{"other", int64(1700000000001)}},
	} {
		sn, err := parseSnapshot([]any{"value", int64(500), int64(9), "7:9", readers, []any{"waiter"}, int64(1)})
		want := protocol.Snapshot{
			Value: "value", Left: 500 * time.Millisecond, Clock: 9, Meta: "7:9",
			Readers: []string{"id", "1700000000000", "other", "1700000000001"}, Queue: []string{"waiter"}, Length: 1,
		}
		if err != nil || !reflect.DeepEqual(sn, want) {
			t.Errorf("%v: %+v, %v", readers, sn, err)
		}
	}
}
