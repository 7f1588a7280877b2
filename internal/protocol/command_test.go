package protocol

import (
	"slices"
	"testing"
	"time"
)

func TestTheValueOfMetaIsParsedAsFarAsItIsWellFormed(t *testing.T) {
	at := time.UnixMicro(1_700_000_000_000_001)
	for meta, want := range map[string]struct {
		token uint64
		at    time.Time
	}{
		"":                                 {},
		"leased1:":                         {},
		"leased1:x:y":                      {},
		"leased2:7:1700000000000001":       {},
		"leased1:7":                        {7, time.Time{}},
		"leased1:7:1700000000000001":       {7, at},
		"leased1:7:1700000000000001:a:b":   {7, at},
		"leased1:x:1700000000000001":       {0, at},
		"leased1:-7:-1":                    {},
		"leased1:9007199254740992:1e9":     {}, // 2^53
		"leased1:9007199254740991:99999e9": {1<<53 - 1, time.Time{}},
	} {
		if token, stored := ParseMeta(meta); token != want.token || !stored.Equal(want.at) {
			t.Errorf("%q: %d at %v", meta, token, stored)
		}
	}
}

func TestOfAClientThatWaitsOnlyTheLastRequestCounts(t *testing.T) {
	request := func(client string, m Mode) string {
		return NewRequest(client, m, time.Minute, false, Unproved, Origin{}).ID
	}
	a, b := NewClientID("same"), NewClientID("same")
	first, second, third, last := request(a, Exclusive), request(b, Shared), request(a, Exclusive), request(a, Shared)
	s := Snapshot{Queue: []string{"not ours", first, second, third, "not ours", last}, Length: 1006}
	requests, number := s.Waiting()
	if want := []string{"not ours", second, "not ours", last}; !slices.Equal(requests, want) || number != 1004 {
		t.Errorf("%d wait, and the first of them are %q, want %q", number, requests, want)
	}
	if requests, number := new(Snapshot).Waiting(); len(requests) > 0 || number != 0 {
		t.Errorf("in no queue %d wait, %q", number, requests)
	}
}

func TestPublishedSaysWhatAnAnswerSaysOfPublishing(t *testing.T) {
	asked, silent := &Command{Echo: "1"}, &Command{}
	for _, c := range []struct {
		a    Answer
		c    *Command
		want int
	}{
		{Answer{Outcome: Enqueued}, asked, 0}, // in a Cluster the subscriber may be at another node
		{Answer{Outcome: Enqueued, Echo: 1}, asked, 1},
		{Answer{Outcome: Enqueued, Echo: EchoDenied}, silent, EchoDenied},
		{Answer{Outcome: Enqueued}, silent, NoEcho},
		{Answer{Outcome: Granted, Echo: 1}, asked, 1},
		{Answer{Outcome: Granted}, asked, 0},
		{Answer{Outcome: Granted}, silent, NoEcho},
		{Answer{Outcome: Refused}, asked, NoEcho},
	} {
		if got := c.a.Published(c.c); got != c.want {
			t.Errorf("%+v to %+v: %d, want %d", c.a, c.c, got, c.want)
		}
	}
}
