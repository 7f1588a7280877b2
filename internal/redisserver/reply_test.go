package redisserver

import (
	"reflect"
	"slices"
	"strings"
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

func TestALongReplyOfAnotherFormIsAnError(t *testing.T) {
	for _, bad := range []longReply{
		{int64(codeGranted), int64(1)},
		{int64(codeQueued), int64(1)},
		{int64(codeRefused), int64(1)},
		{int64(codeGranted), int64(-1), int64(9), int64(0), int64(0), int64(0), int64(0), int64(0), int64(0)},
		{int64(codeGranted), "1", int64(9), int64(0), int64(0), int64(0), int64(0), int64(0), int64(0)},
		{int64(codeDone + 1), int64(0)},
		{1.5, int64(0)},
	} {
		a, err := parseAnswer(bad)
		if err == nil || !strings.Contains(err.Error(), "malformed answer") {
			t.Errorf("%v is read as %+v, %v", bad, a, err)
		}
	}
	if _, err := parseAnswer(longReply{int64(codeGranted), "odd"}); err == nil || !strings.Contains(err.Error(), "odd") {
		t.Errorf("%v does not quote the answer", err)
	}
}

func TestEachPlaceOfALongReplyIsReadIntoItsField(t *testing.T) {
	of := func(code int64, rest ...any) longReply { return append(longReply{code}, rest...) }
	no, yes := int64(0), int64(1)
	for _, c := range []struct {
		reply longReply
		want  protocol.Answer
	}{
		{of(codeGranted, int64(7), int64(9), no, int64(3), no, no, no, int64(2)),
			protocol.Answer{Outcome: protocol.Granted, Token: 7, Clock: 9, Handed: 3, Echo: 2}},
		{of(codeGranted, int64(7), int64(9), yes, no, no, int64(keptToken), no, no),
			protocol.Answer{Outcome: protocol.Granted, Token: 7, Clock: 9, More: true, Kept: true}},
		{of(codeGranted, int64(7), int64(9), no, no, yes, int64(keptAnew), yes, no),
			protocol.Answer{Outcome: protocol.Granted, Token: 7, Clock: 9, Unfinished: true, Kept: true, Forgot: true, Gone: true}},
		{of(codeQueued, int64(7), int64(9), int64(2), int64(500), "owner", no, int64(4), int64(3), no, int64(8), no),
			protocol.Answer{Outcome: protocol.Enqueued, Token: 7, Clock: 9, Place: 2, Left: 500 * time.Millisecond, Blocker: "owner", Echo: 4, Handed: 3, Told: 8}},
		{of(codeRefused, int64(7), int64(9), no, no, "", yes, no, no, no, int64(-1), no),
			protocol.Answer{Outcome: protocol.Refused, Token: 7, Clock: 9, NoNotify: true}},
		{of(codeQueued, int64(7), int64(9), no, no, "", no, no, no, yes, no, yes),
			protocol.Answer{Outcome: protocol.Enqueued, Token: 7, Clock: 9, Unfinished: true, Gone: true}},
		{of(codeNotOurs, no), protocol.Answer{Outcome: protocol.NotOurs}},
		{of(codeNotOurs, no, int64(9), int64(8)), protocol.Answer{Outcome: protocol.NotOurs, Clock: 9, Mark: 8}},
		{of(codeDone, int64(3)), protocol.Answer{Outcome: protocol.Done, Handed: 3}},
		{of(codeDone, int64(3), no), protocol.Answer{Outcome: protocol.Done, Handed: 3}},
		{of(codeDone, int64(3), yes), protocol.Answer{Outcome: protocol.Done, Handed: 3, Unfinished: true}},
	} {
		if a, err := parseAnswer(c.reply); err != nil || a != c.want {
			t.Errorf("%v is read as\n%+v, %v, not\n%+v", c.reply, a, err, c.want)
		}
	}
	canceled := protocol.Canceled{Owned: true, Token: 7, Clock: 9, Mark: 8}
	if c := parseCanceled([]any{int64(codeGranted), no, yes, int64(7), int64(9), int64(8), no}, nil); c != canceled {
		t.Errorf("a cancel is read as %+v, not %+v", c, canceled)
	}
	for _, reply := range [][]any{{"8", "reply"}, {"8", "7", "9"}} {
		if _, mark, err := marked(reply); mark != 8 || err != nil {
			t.Errorf("%v: the mark is %d, %v", reply, mark, err)
		}
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
